"""What every vector width computes, with this machine's instructions: tests/emulated has those of others."""

import platform
import subprocess
from pathlib import Path

import pytest

from common.errors import ConfigError
from common.native.build import compiler

SOURCE = Path(__file__).parents[3] / "emulated" / "kernels.cpp"
HAS_FMA = platform.machine() != "x86_64" or " fma " in Path("/proc/cpuinfo").read_text()
NATIVE = "-march=native" if platform.machine() == "x86_64" else "-mcpu=native"


def results(folder: Path, *flags: str) -> list[str]:
    program = folder / "kernels"
    always = ("-std=c++17", "-O1", "-pthread", "-ffp-contract=off", "-Wno-psabi", NATIVE)
    subprocess.run([*compiler(), *always, *flags, str(SOURCE), "-o", str(program)], check=True, timeout=300)
    return subprocess.run([program], check=True, timeout=60, capture_output=True, text=True).stdout.splitlines()


@pytest.mark.slow
@pytest.mark.skipif(not HAS_FMA, reason="products round separately without FMA")
def test_every_kernel_computes_the_same_bits_at_every_vector_width(tmp_path: Path) -> None:
    try:
        compiler()
    except ConfigError as error:
        pytest.skip(error.message)
    wanted = results(tmp_path)
    assert wanted[-1] == "end"
    assert len(wanted) > 300
    for width in (4, 8, 16):
        assert results(tmp_path, f"-DBATON_WIDTH={width}") == wanted
