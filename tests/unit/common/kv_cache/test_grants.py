from common.kv_cache.grants import Grants
from common.messages import BlockId, BlockRef, Generation, RequestId


def refs(*blocks: int, generation: int = 1) -> list[BlockRef]:
    return [BlockRef(BlockId(block), Generation(generation)) for block in blocks]


def test_a_secret_opens_what_was_granted_under_it_and_nothing_else() -> None:
    grants = Grants()
    grants.grant(b"a", refs(1, 2), request=RequestId("first"))
    grants.grant(b"a", refs(3), request=RequestId("first"))
    grants.grant(b"b", refs(3, 4), request=RequestId("second"))
    assert grants.allows(b"a", refs(3, 1, 2))
    assert not grants.allows(b"a", refs(1, 4))
    assert not grants.allows(b"b", refs(1))
    assert not grants.allows(b"c", refs(1))
    assert grants.requests == ("first", "second")


def test_a_stranger_has_no_secret_and_gets_nothing() -> None:
    grants = Grants()
    assert not grants.allows(b"", [])
    assert not grants.knows(b"")


def test_a_block_that_was_reused_is_not_the_one_that_was_granted() -> None:
    grants = Grants()
    grants.grant(b"a", refs(1), request=RequestId("r"))
    assert not grants.allows(b"a", refs(1, generation=2))


def test_a_revoked_secret_opens_nothing_and_leaves_nothing() -> None:
    grants = Grants()
    grants.grant(b"a", refs(1), request=RequestId("r"))
    grants.revoke(b"a")
    grants.revoke(b"a")
    assert not grants.knows(b"a")
    assert not grants.allows(b"a", refs(1))
    assert grants.requests == ()
