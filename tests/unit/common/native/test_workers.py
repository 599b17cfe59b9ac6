"""Workers in C++: every item once, whoever runs it; lent cores are given back as soon as their owner works."""

import ctypes
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from threading import Thread

import numpy as np
import pytest

from common.cores import HostCores
from common.errors import ConfigError
from common.native.build import SOURCES, compiler
from common.native.loans import Loans

try:
    COMMAND = [*compiler(), "-std=c++17", "-g", "-pthread", f"-I{SOURCES}"]
except ConfigError as error:
    pytest.skip(error.message, allow_module_level=True)

SOURCE = Path(__file__).with_name("workers_test.cpp")
ITEMS = 200
Reached = ctypes.CFUNCTYPE(None)


class CallArgs(ctypes.Structure):
    _fields_ = (
        ("count", ctypes.c_int32),
        ("threads", ctypes.c_int32),
        ("at", ctypes.c_int32),
        ("reached", Reached),
        ("times_run", ctypes.c_void_p),
        ("by_others", ctypes.c_int32),
        ("after", ctypes.c_int32),
        ("was_reached", ctypes.c_bool),
    )


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    target = tmp_path_factory.mktemp("workers") / "workers.so"
    subprocess.run([*COMMAND, "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(target)], check=True, timeout=100)
    loaded = ctypes.CDLL(str(target))
    loaded.begin_shift.argtypes = (ctypes.c_int, ctypes.c_void_p)
    loaded.each.argtypes = (ctypes.c_void_p,)
    return loaded


@dataclass
class Host:
    """A host of three cores: our node's, its neighbour's and nobody's."""

    kernel: ctypes.CDLL
    ours: HostCores
    neighbour: HostCores

    def shift(self) -> int:
        """Begins one; how many threads it may use."""
        self.loans = Loans(self.ours)
        assert self.kernel.begin_shift(1, self.loans.address())
        return int(self.kernel.threads())

    def each(self, threads: int, *, at: int = -1, reached: object = lambda: None) -> CallArgs:
        times_run = np.zeros(ITEMS, np.int32)
        call = CallArgs(ITEMS, threads, at, Reached(reached), times_run.ctypes.data)
        self.kernel.each(ctypes.addressof(call))
        assert (times_run == 1).all()
        return call


@pytest.fixture
def host(kernel: ctypes.CDLL, tmp_path: Path) -> Iterator[Host]:
    kernel.renew()
    host = Host(kernel, *(HostCores(1, cores=2, path=tmp_path / "cores") for _ in range(2)))
    yield host
    host.ours.close()
    host.neighbour.close()


def each_until_helped(host: Host, threads: int) -> CallArgs:
    """A late worker is not waited for, so on a busy machine a call may be over before one comes."""
    while not (call := host.each(threads)).by_others:
        pass
    return call


def test_every_item_runs_once_on_any_number_of_threads(host: Host) -> None:
    assert host.each(1).by_others == 0
    for threads in (2, 3, 8):
        each_until_helped(host, threads)


def test_a_resting_neighbours_core_helps_and_is_given_back_with_the_step(host: Host) -> None:
    (core, _), *_ = host.ours.lendable()
    assert host.shift() == 2
    each_until_helped(host, 2)
    assert not host.neighbour.lock(core, 1)
    host.kernel.end_shift()
    assert host.neighbour.lock(core, 1)
    assert host.loans.borrowed_s > 0


def test_nothing_is_borrowed_from_a_neighbour_that_works(host: Host) -> None:
    host.neighbour.work()
    assert host.shift() == 1
    host.kernel.end_shift()
    assert host.loans.borrowed_s == 0


def test_a_core_has_one_borrower_at_a_time(host: Host, tmp_path: Path) -> None:
    (core, _), *_ = host.ours.lendable()
    assert host.neighbour.lock(core, 1)
    assert host.shift() == 1
    host.kernel.end_shift()


def test_a_neighbour_that_comes_to_work_in_the_middle_gets_its_core_back(host: Host) -> None:
    assert host.shift() == 2
    each_until_helped(host, 2)
    call = host.each(2, at=20, reached=host.neighbour.work)
    assert call.after <= 2  # the item in progress, and one more within the time between two looks
    while host.kernel.threads() > 1:  # the worker has not looked yet: it slept
        assert host.each(2).by_others <= 2
    assert host.each(1).by_others == 0
    host.kernel.end_shift()


def test_the_core_of_a_process_that_has_ended_is_free(host: Host) -> None:
    host.neighbour.work()
    host.neighbour.close()
    assert host.shift() == 2
    host.kernel.end_shift()


def test_another_thread_runs_alone_beside_a_shift(host: Host) -> None:
    assert host.shift() == 2
    calls: list[CallArgs] = []
    other = Thread(target=lambda: calls.append(host.each(8)))
    other.start()
    other.join()
    host.kernel.end_shift()
    assert calls[0].by_others == 0


@pytest.mark.slow
def test_thread_sanitizer_finds_nothing(tmp_path: Path) -> None:
    program = tmp_path / "stress"
    build = [*COMMAND, "-O1", "-DSTRESS", "-fsanitize=thread", str(SOURCE), "-o", str(program)]
    if subprocess.run(build, capture_output=True, check=False, timeout=100).returncode:
        pytest.skip("the compiler has no ThreadSanitizer")
    done = subprocess.run([program, tmp_path / "cores"], capture_output=True, text=True, check=False, timeout=100)
    assert (done.returncode, done.stdout) == (0, "right\n"), done.stderr
