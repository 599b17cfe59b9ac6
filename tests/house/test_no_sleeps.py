"""Tests wait for events or advance a clock; they never sleep."""

import ast
from collections.abc import Iterable, Iterator

from tests.house.source import Source, python_files


def sleeps(sources: Iterable[Source]) -> Iterator[str]:
    """Calls of anything named sleep, but for `sleep(0)`, which only gives others their turn."""
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name == "sleep" and [ast.unparse(arg) for arg in node.args] != ["0"]:
                    yield f"{source.path}:{node.lineno}"


# What is no test but measures or spends real time.
_PROGRAMS = ("tests/benchmarks/", "tests/chaos/")


def test_no_test_sleeps() -> None:
    tests = [source for source in python_files("tests") if not source.path.startswith(_PROGRAMS)]
    assert list(sleeps(tests)) == []


def test_sleeps_are_found() -> None:
    text = "time.sleep(1)\nawait asyncio.sleep(0)\nsleep(delay)\nawait anyio.sleep(0.1)\n"
    assert list(sleeps([Source("t.py", text)])) == ["t.py:1", "t.py:3", "t.py:4"]
