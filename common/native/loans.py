"""The cores that a step may borrow, as the kernels see them (csrc/loans.h)."""

import ctypes
import time

import numpy as np

from common import telemetry
from common.cores import HostCores
from common.native import abi

log = telemetry.logger(__name__)

_REFRESH_S = 1.0
_SAID_S = 60.0


class Loans:
    """What is lendable is looked up anew once a second: nodes come and go rarely. For the engine's thread."""

    def __init__(self, cores: HostCores) -> None:
        self._cores = cores
        self._args = abi.LoansArgs(fd=cores.fd)
        self._refreshed_s = self._said_s = -_SAID_S
        self._said_borrowed_s = 0.0

    @property
    def borrowed_s(self) -> float:
        """For how long borrowed cores have computed."""
        return float(self._args.borrowed_ns) / 1e9

    def address(self) -> int:
        """Of the struct, for one step."""
        now_s = time.monotonic()
        if now_s - self._refreshed_s > _REFRESH_S:
            self._refresh()
            self._refreshed_s = now_s
            if now_s - self._said_s > _SAID_S and self.borrowed_s > self._said_borrowed_s:
                self._said_s, self._said_borrowed_s = now_s, self.borrowed_s
                log.info("cores borrowed", seconds_in_all=self.borrowed_s)
        return ctypes.addressof(self._args)

    def _refresh(self) -> None:
        lendable = self._cores.lendable()
        self._arrays = tuple(np.array([pair[part] for pair in lendable], np.int64) for part in range(2))
        self._args.cores, self._args.owners = (array.ctypes.data for array in self._arrays)
        self._args.count = len(lendable)
