import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("lambda: 7", 0),
        ("lambda: sys.exit(3)", 3),
        ("lambda: sys.exit()", 0),
        ("lambda: sys.exit('why')", 1),
        ("lambda: 1 / 0", 1),
    ],
)
def test_a_program_ends_at_once_with_its_code_and_all_it_printed(program: str, code: int) -> None:
    text = f"""
import atexit, sys
from common.ending import end_with
atexit.register(print, "late")
print("said")
end_with({program})
"""
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == code, done.stderr
    assert done.stdout == "said\n"
    assert bool(done.stderr) == (code == 1)
