"""What the gateway calls a prompt's blocks is what the nodes call them."""

from common.kv_cache.cache_news import OfferedNames
from common.kv_cache.prefix_cache import hash_blocks, root_hash
from common.messages import NodeState, View
from coordinator.gateway.prefix import prefix_names
from tests.unit.coordinator.gateway.cluster import MODEL, node_view, says
from tests.unit.coordinator.gateway.conftest import RunningGateway

PROMPT = list(range(100, 150))


def offered_names(tokens: list[int], tenant: bytes = b"") -> bytes:
    """As a node's report tells them."""
    offered = OfferedNames()
    root = root_hash(model_digest="digest", tenant_salt=tenant)
    offered.change([(content, True) for content in hash_blocks(tokens, 16, root)])
    with offered.telling() as teller:
        news = teller.next()
        assert news is not None
        return news.added


def test_a_prompt_has_a_name_for_each_full_block_the_one_that_its_nodes_report() -> None:
    view = View((node_view("decode-0"),))
    names = prefix_names(PROMPT, view, MODEL)
    assert len(names) == 3 * 8
    assert names == offered_names(PROMPT)
    assert prefix_names(PROMPT[:15], view, MODEL) == b""


def test_another_tenants_identical_prompt_has_other_names() -> None:
    view = View((node_view("decode-0"),))
    names = [prefix_names(PROMPT, view, MODEL, tenant=tenant) for tenant in (b"", b"ours", b"theirs")]
    assert len(set(names)) == 3
    assert names[1] == offered_names(PROMPT, b"ours")


def test_without_a_node_of_the_model_that_fits_nothing_has_a_name() -> None:
    other, misfit = node_view("decode-0", model="other"), node_view("decode-1", state=NodeState.INCOMPATIBLE)
    assert prefix_names(PROMPT, View((other, misfit)), MODEL) == b""
    assert prefix_names(PROMPT, View((other, misfit, node_view("decode-2"))), MODEL) != b""


async def test_a_request_asks_for_its_route_by_the_names_of_its_prompt(gateway: RunningGateway) -> None:
    gateway.cluster.generate = says(gateway.tokenizer.encode("one"))
    tokens = gateway.tokenizer.encode("one two three") * 20
    await gateway.post("/v1/completions", {"prompt": tokens[:40]})
    [route] = gateway.cluster.routes
    assert route.prefix == offered_names(tokens[:40])
    assert len(route.prefix) == 2 * 8
