"""Places on a host: whose cores may be borrowed, and what a process may use at all."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from common.cores import NOBODY, HostCores, usable_cores

Join = Callable[..., HostCores]


@pytest.fixture
def join(tmp_path: Path) -> Iterator[Join]:
    places: list[HostCores] = []

    def join(threads: int = 1, *, cores: int = 2) -> HostCores:
        places.append(HostCores(threads, cores=cores, path=tmp_path / "cores"))
        return places[-1]

    yield join
    for place in places:
        place.close()


def owners(node: HostCores) -> list[bool]:
    """Of each lendable core: whether it has an owner."""
    return [owner != NOBODY for _, owner in node.lendable()]


def test_a_node_alone_may_borrow_what_nobody_owns(join: Join) -> None:
    assert owners(join(1, cores=4)) == [False] * 3


def test_two_nodes_may_borrow_each_others_cores(join: Join) -> None:
    first, second = join(3, cores=7), join(3, cores=7)
    assert owners(first) == owners(second) == [True] * 3 + [False]
    assert not {core for core, owner in first.lendable() if owner != NOBODY} & {
        core for core, owner in second.lendable() if owner != NOBODY
    }


def test_with_more_threads_than_cores_nobody_borrows(join: Join) -> None:
    first, second, third = (join() for _ in range(3))
    assert first.lendable() == second.lendable() == third.lendable() == []
    third.close()
    assert owners(first) == owners(second) == [True]


def test_only_a_working_node_locks_its_byte(join: Join) -> None:
    first, second = join(), join()
    [(_, owner)] = first.lendable()
    second.work()
    assert not first.lock(owner, 1)
    second.rest()
    assert first.lock(owner, 1)


def test_a_killed_process_leaves_its_place_and_its_locks(join: Join, tmp_path: Path) -> None:
    program = (
        "import os, signal; from pathlib import Path; from common.cores import HostCores\n"
        f"node = HostCores(1, cores=2, path=Path({str(tmp_path / 'cores')!r})); node.work()\n"
        "print(node.lendable(), flush=True); os.kill(os.getpid(), signal.SIGKILL)"
    )
    node = join(1, cores=3)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert done.stdout.count("Lendable") == 1, done.stderr
    assert owners(node) == [False, False]


def test_the_file_stays_empty(join: Join, tmp_path: Path) -> None:
    join().work()
    assert (tmp_path / "cores").read_bytes() == b""
    assert (tmp_path / "cores").stat().st_mode & 0o777 == 0o600


def test_a_link_in_its_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "cores").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="cores"):
        HostCores(1, cores=2, path=tmp_path / "cores")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize(
    ("group", "files", "usable"),
    [
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000\n", "a/cpu.max": "150000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 1),
        ("3:cpuset:/\n2:cpu,a:/b\n", {"cpu,a/b/cpu.cfs_quota_us": "-1", "cpu,a/b/cpu.cfs_period_us": "9"}, 0),
        ("2:cpu:/gone\n", {"cpu/cpu.cfs_quota_us": "100000", "cpu/cpu.cfs_period_us": "100000"}, 1),
        ("", {}, 0),
    ],
)  # fmt: skip
def test_a_quota_of_cpu_time_counts_in_whole_cores(
    group: str, files: dict[str, str], usable: int, tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(group)
    for name, text in files.items():
        path = tmp_path / "sys/fs/cgroup" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert usable_cores(root=tmp_path) == (usable or len(os.sched_getaffinity(0)))
