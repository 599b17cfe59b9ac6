import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.kv_cache import cache_news
from common.kv_cache.cache_news import OfferedNames
from common.messages import CACHE_NAME_BYTES, BlockHash, CacheNews


def content(number: int) -> BlockHash:
    """As long as a real hash, told apart by its first bytes."""
    return BlockHash(number.to_bytes(CACHE_NAME_BYTES, "big") + bytes(24))


def names(*numbers: int) -> bytes:
    return b"".join(content(number)[:CACHE_NAME_BYTES] for number in numbers)


def test_a_listener_hears_the_whole_first_and_then_what_changed() -> None:
    offered = OfferedNames()
    offered.change([(content(1), True), (content(2), True)])
    with offered.telling() as teller:
        assert teller.next() == CacheNews(added=names(1, 2), whole=True)
        assert teller.next() is None
        offered.change([(content(3), True), (content(1), False)])
        assert teller.next() == CacheNews(added=names(3), dropped=names(1))
        assert teller.next() is None


def test_an_empty_cache_is_told_as_such_for_the_listener_may_remember_another() -> None:
    with OfferedNames().telling() as teller:
        assert teller.next() == CacheNews(whole=True)
        assert teller.next() is None


def test_what_came_and_went_between_two_parts_is_told_as_it_ended() -> None:
    offered = OfferedNames()
    with offered.telling() as teller:
        teller.next()
        offered.change([(content(1), True), (content(2), True), (content(1), False), (content(1), True)])
        assert teller.next() == CacheNews(added=names(2, 1))


def test_a_large_cache_is_told_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_news, "MOST_NAMES", 2)
    offered = OfferedNames()
    offered.change([(content(number), True) for number in range(3)])
    with offered.telling() as teller:
        assert teller.next() == CacheNews(added=names(0, 1), whole=True)
        assert teller.has_more
        assert teller.next() == CacheNews(added=names(2))
        assert not teller.has_more


def test_each_listener_hears_all_for_itself_and_none_is_left() -> None:
    offered = OfferedNames()
    with offered.telling() as first:
        first.next()
        offered.change([(content(1), True)])
        with offered.telling() as second:
            assert second.next() == CacheNews(added=names(1), whole=True)
        assert first.next() == CacheNews(added=names(1))
    assert offered._tellers == []


@given(st.lists(st.one_of(st.none(), st.tuples(st.integers(0, 5), st.booleans()))))
def test_whenever_parts_are_taken_the_listener_ends_up_with_what_is_offered(
    history: list[tuple[int, bool] | None],
) -> None:
    """None takes a part."""
    offered, truth, heard = OfferedNames(), set[bytes](), set[bytes]()

    def hear(news: CacheNews | None) -> None:
        if news is None:
            return
        if news.whole:
            heard.clear()
        for start in range(0, len(news.added), CACHE_NAME_BYTES):
            heard.add(news.added[start : start + CACHE_NAME_BYTES])
        for start in range(0, len(news.dropped), CACHE_NAME_BYTES):
            heard.discard(news.dropped[start : start + CACHE_NAME_BYTES])

    with offered.telling() as teller:
        for step in [*history, None]:
            if step is None:
                hear(teller.next())
                assert heard == truth
            else:
                number, is_offered = step
                offered.change([(content(number), is_offered)])
                (truth.add if is_offered else truth.discard)(names(number))
