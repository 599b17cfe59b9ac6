"""Things of which a process needs one while anybody uses them, and none afterwards."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Generic, TypeVar

T = TypeVar("T")


class Shared(Generic[T]):
    """Made for the first borrower, dropped when the last one has given back. Event loop only, no locks."""

    def __init__(self, make: Callable[[], T], drop: Callable[[T], None]) -> None:
        self._make = make
        self._drop = drop
        self._thing: T | None = None
        self._num_borrowers = 0

    def borrow(self) -> T:
        if self._thing is None:
            self._thing = self._make()
        self._num_borrowers += 1
        return self._thing

    def give_back(self) -> None:
        assert self._num_borrowers > 0 and self._thing is not None
        self._num_borrowers -= 1
        if self._num_borrowers == 0:
            thing, self._thing = self._thing, None
            self._drop(thing)


COPY_THREAD: Shared[ThreadPoolExecutor] = Shared(
    lambda: ThreadPoolExecutor(max_workers=1, thread_name_prefix="kv-copy"),
    lambda executor: executor.shutdown(wait=True),
)
"""Where bytes are copied into the pool. One thread: a second one fights the first for memory bandwidth and
the model for its cores. Borrowers give it back only when their copies have ended, so `shutdown` never waits long."""
