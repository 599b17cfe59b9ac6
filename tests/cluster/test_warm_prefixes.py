"""Where a prompt goes when a node has computed its beginning before."""

from common.messages import CACHE_NAME_BYTES, NodeAddress, NodeId, Origin, Routed
from coordinator.gateway.prefix import prefix_names
from tests.caller import Answer
from tests.cluster.cluster import MODEL, Cluster
from tests.cluster.test_one_request import prompt


def address_of(cluster: Cluster, name: str) -> NodeAddress:
    [card] = [node.card for node in cluster.coordinator.state.view().nodes if node.card.node == name]
    return NodeAddress(card.node, card.incarnation, card.address, card.offers)


def names_of(cluster: Cluster, tokens: list[int], tenant: bytes = b"") -> bytes:
    return prefix_names(tokens, cluster.coordinator.state.view(), MODEL, tenant=tenant)


async def ask(cluster: Cluster, tokens: list[int], *, tenant: bytes = b"", routed: Routed | None = None) -> Answer:
    """As a gateway asks, names and all."""
    names, origin = names_of(cluster, tokens, tenant), Origin(tenant)
    answer = await cluster.caller.ask(tokens, 8, routed=routed, prefix=names, origin=origin)
    assert answer.tokens == cluster.expected(tokens)
    return answer


async def warm(cluster: Cluster, tokens: list[int], *, tenant: bytes = b"") -> None:
    """On the pair that nobody would choose, until the coordinator knows."""
    pair = Routed(address_of(cluster, "decode-1"), address_of(cluster, "prefill-1"))
    await ask(cluster, tokens, tenant=tenant, routed=pair)
    await is_known_to_be_warm(cluster, names_of(cluster, tokens, tenant))


async def is_known_to_be_warm(cluster: Cluster, names: bytes) -> None:
    blocks = {names[start : start + CACHE_NAME_BYTES] for start in range(0, len(names), CACHE_NAME_BYTES)}

    def known() -> bool:
        nodes = cluster.coordinator.state._nodes
        if any(node.load.leased_blocks for node in nodes.values()):
            return False  # the last one's blocks have gone, and the coordinator knows
        return all(blocks <= nodes[NodeId(name)].cached for name in ("prefill-1", "decode-1") if name in nodes)

    await cluster.until(lambda: len(cluster.coordinator.state.view().nodes) == 4 and known())


def pair_of(answer: Answer) -> tuple[str | None, str]:
    assert answer.routed is not None
    return answer.routed.prefill.node if answer.routed.prefill else None, answer.routed.decode.node


async def test_a_prompt_with_a_warm_beginning_goes_to_the_nodes_that_have_it(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=2, decode=2)
    await warm(cluster, prompt(500))
    answer = await ask(cluster, prompt(500) + prompt(100, 1))
    assert pair_of(answer) == ("prefill-1", "decode-1")
    assert answer.routed is not None
    assert answer.routed.why == "cached-prefix"
    assert cluster.nodes["prefill-1"].brake.num_tokens == 500 + 600 - 496, "only what is new is computed"
    assert pair_of(await ask(cluster, prompt(500, 2))) == ("prefill-0", "decode-0"), "nobody has this one"


async def test_a_prompt_that_its_decode_node_has_is_computed_there(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=2, decode=2)
    await warm(cluster, prompt(500))
    answer = await ask(cluster, prompt(500))
    assert pair_of(answer) == (None, "decode-1")
    assert answer.routed is not None
    assert answer.routed.why == "cached-at-home"
    assert cluster.nodes["prefill-1"].brake.num_tokens == 500


async def test_what_a_pool_had_to_evict_is_warm_nowhere(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=2, decode=2, num_blocks=40)
    await warm(cluster, prompt(500))
    await warm(cluster, prompt(630, 1))  # all 40 blocks
    answer = await ask(cluster, prompt(500))
    assert pair_of(answer) == ("prefill-0", "decode-0")


async def test_what_a_pool_had_to_evict_is_warm_from_host_memory(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=2, decode=2, num_blocks=40, num_host_blocks=80)
    await warm(cluster, prompt(500))
    await warm(cluster, prompt(630, 1))  # all 40 blocks
    answer = await ask(cluster, prompt(500) + prompt(40, 2))
    assert pair_of(answer) == ("prefill-1", "decode-1")
    assert answer.last is not None
    assert answer.last.cached_tokens == 496
    loads = [cluster.nodes[name].load for name in ("prefill-1", "decode-1")]
    assert all(load.num_blocks_out >= 31 and load.num_blocks_in == 31 for load in loads)


async def test_another_tenants_identical_prompt_is_warm_nowhere(cluster: Cluster) -> None:
    await cluster.start_pools(prefill=2, decode=2)
    await warm(cluster, prompt(500), tenant=b"ours")
    answer = await ask(cluster, prompt(500), tenant=b"theirs")
    assert pair_of(answer) == ("prefill-0", "decode-0")
    assert answer.last is not None
    assert answer.last.cached_tokens == 0
    assert pair_of(await ask(cluster, prompt(500), tenant=b"ours")) == (None, "decode-1")
