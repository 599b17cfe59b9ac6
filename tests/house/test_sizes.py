"""A file is split before 400 lines, a function before 60."""

import ast
from collections.abc import Iterable, Iterator

from tests.house.source import ROOMS, Source, python_files

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60

EXEMPT = {
    "common/messages.py": "all that can be said on a wire stands in one file",
}


def long_files(sources: Iterable[Source]) -> Iterator[str]:
    for source in sources:
        if source.num_lines > MAX_FILE_LINES and source.path not in EXEMPT:
            yield f"{source.path}: {source.num_lines} lines"


def long_functions(sources: Iterable[Source]) -> Iterator[str]:
    for source in sources:
        for node in ast.walk(source.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    yield f"{source.path}:{node.lineno}: {node.name} has {num_lines} lines"


def test_no_file_is_longer_than_400_lines() -> None:
    assert list(long_files(python_files(*ROOMS, "tests"))) == []


def test_no_function_is_longer_than_60_lines() -> None:
    assert list(long_functions(python_files(*ROOMS, "tests"))) == []


def test_long_ones_are_found() -> None:
    body = "    x = 1\n"
    assert list(long_files([Source("a.py", "x = 1\n" * 401)])) == ["a.py: 401 lines"]
    assert list(long_files([Source("a.py", "x = 1\n" * 400)])) == []
    assert list(long_functions([Source("a.py", "async def f():\n" + 60 * body)])) == ["a.py:1: f has 61 lines"]
    assert list(long_functions([Source("a.py", "def f():\n" + 59 * body)])) == []
