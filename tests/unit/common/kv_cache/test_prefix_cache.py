import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RequestError
from common.kv_cache.block_pool import BlockPool
from common.kv_cache.prefix_cache import cached_prefix, extend_hashes, hash_blocks, root_hash

ROOT = root_hash(model_digest="m")


def test_a_hash_is_the_same_on_every_machine_and_in_every_process() -> None:
    [name] = hash_blocks(range(16), 16, root_hash(model_digest="model", adapter_digest="lora", tenant_salt=b"salt"))
    assert name.hex() == "0f9bd0b8f737b62f0ee4fafdd4e4859ad66958aa1d57ed3914b393f50e1b4310"


def test_model_adapter_and_tenant_each_enter_the_hash_and_none_passes_for_its_neighbour() -> None:
    roots = [
        root_hash(model_digest="ab"),
        root_hash(model_digest="a", adapter_digest="b"),
        root_hash(model_digest="a", tenant_salt=b"b"),
        root_hash(model_digest="", adapter_digest="ab"),
        root_hash(model_digest="", adapter_digest="a", tenant_salt=b"b"),
        root_hash(model_digest="", tenant_salt=b"ab"),
    ]
    assert len(set(roots)) == len(roots)
    assert len({hash_blocks([1] * 4, 4, root)[0] for root in roots}) == len(roots)


@given(st.lists(st.integers(0, 2**32 - 1), max_size=40), st.integers(0, 40), st.integers(1, 7))
def test_hashes_grown_with_the_tokens_equal_those_of_the_whole(tokens: list[int], cut: int, block_size: int) -> None:
    grown = hash_blocks(tokens[:cut], block_size, ROOT)
    extend_hashes(grown, tokens, block_size, ROOT)
    assert grown == hash_blocks(tokens, block_size, ROOT)
    assert len(grown) == len(tokens) // block_size
    assert len(set(grown)) == len(grown)


@given(st.integers(0, 11))
def test_a_changed_token_renames_its_block_and_all_that_follow(position: int) -> None:
    tokens = list(range(12))
    changed = [*tokens[:position], 99, *tokens[position + 1 :]]
    pairs = zip(hash_blocks(tokens, 4, ROOT), hash_blocks(changed, 4, ROOT), strict=True)
    assert [one == other for one, other in pairs] == [index < position // 4 for index in range(3)]


@pytest.mark.parametrize("token", [-1, 2**32])
def test_a_token_id_that_is_none_is_the_requests_fault(token: int) -> None:
    with pytest.raises(RequestError):
        hash_blocks([1, token], 2, ROOT)


@pytest.mark.parametrize(
    ("num_tokens", "hits"), [(1, 0), (15, 0), (16, 0), (17, 1), (31, 1), (32, 1), (33, 2), (48, 2), (49, 3)]
)
def test_a_hit_never_covers_the_last_token(num_tokens: int, hits: int) -> None:
    pool = BlockPool(3, [0] * 3)
    blocks = pool.allocate(3)
    assert blocks is not None
    for block, name in zip(blocks, hash_blocks(range(48), 16, ROOT), strict=True):
        pool.name(block, name)
    hashes = hash_blocks(range(num_tokens), 16, ROOT)
    assert cached_prefix(pool, hashes, num_tokens, 16) == blocks[:hits]


def test_a_hit_ends_at_the_first_block_that_is_gone() -> None:
    pool = BlockPool(3, [0] * 3)
    hashes = hash_blocks(range(13), 4, ROOT)
    blocks = pool.allocate(3)
    assert blocks is not None
    pool.name(blocks[0], hashes[0])
    pool.name(blocks[2], hashes[2])
    assert cached_prefix(pool, hashes, 13, 4) == blocks[:1]
