"""Who may import whom: by contract (import-linter), and as it happens (a fresh interpreter)."""

import subprocess
import sys

from tests.house.source import ROOT, python_files

_HEAVY = ("torch", "transformers", "ucxx")


def run_python(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=50, check=False
    )


def test_the_import_contracts_are_kept() -> None:
    program = "from importlinter.cli import lint_imports; import sys; sys.exit(lint_imports(no_cache=True))"
    done = run_python(program)
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_module_of_the_control_plane_loads_torch() -> None:
    modules = [
        source.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        for source in python_files("coordinator")
    ]
    program = f"""
import importlib, sys
for name in {modules!r}:
    importlib.import_module(name)
    heavy = [module for module in {_HEAVY!r} if module in sys.modules]
    assert not heavy, f"{{name}} loads {{heavy}}"
"""
    done = run_python(program)
    assert done.returncode == 0, done.stderr
