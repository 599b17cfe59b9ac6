"""What a pool offers by name, told to every coordinator bit by bit. Plain data; no thread but the caller's.

1. A teller first tells the whole, then what changed since. A part has at most `MOST_NAMES` names, the rest follows
   in the next ones, so a large cache holds up neither its node nor a link.
2. A teller tells of each name only where it ended: what came and went between two parts, or goes and comes, is told
   once. So nothing grows beyond the names that either side knows.
3. Names are cut to `CACHE_NAME_BYTES`. Two contents that share one would make a coordinator hope in vain, no more:
   a node looks its blocks up by whole hashes.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import islice

from common.messages import CACHE_NAME_BYTES, BlockHash, CacheNews

MOST_NAMES = 4096


class OfferedNames:
    """The names that one pool offers now, in the order in which they came."""

    def __init__(self) -> None:
        self._names: dict[bytes, None] = {}
        self._tellers: list[CacheTeller] = []

    def change(self, changes: Iterable[tuple[BlockHash, bool]]) -> None:
        """Contents, in order, and whether each came to be offered or ceased to be."""
        for content, is_offered in changes:
            name = content[:CACHE_NAME_BYTES]
            if is_offered:
                self._names[name] = None
            else:
                self._names.pop(name, None)
            for teller in self._tellers:
                teller.note(name, is_offered=is_offered)

    @contextmanager
    def telling(self) -> Iterator["CacheTeller"]:
        """Tells one listener, who knows nothing yet, for as long as the context is open."""
        teller = CacheTeller(self._names)
        self._tellers.append(teller)
        try:
            yield teller
        finally:
            self._tellers.remove(teller)


class CacheTeller:
    """What one listener has still to be told."""

    def __init__(self, names: Iterable[bytes]) -> None:
        self._untold = dict.fromkeys(names, True)  # name -> whether it is offered
        self._is_first = True

    @property
    def has_more(self) -> bool:
        return bool(self._untold)

    def note(self, name: bytes, *, is_offered: bool) -> None:
        self._untold.pop(name, None)  # to the end: a prefix's names are told in its order
        self._untold[name] = is_offered

    def next(self) -> CacheNews | None:
        """The next part, or None if everything is told."""
        if not self._untold and not self._is_first:
            return None
        part = list(islice(self._untold.items(), MOST_NAMES))
        for name, _ in part:
            del self._untold[name]
        whole, self._is_first = self._is_first, False
        return CacheNews(
            added=b"".join(name for name, is_offered in part if is_offered),
            dropped=b"".join(name for name, is_offered in part if not is_offered),
            whole=whole,
        )
