"""Nouns for things: no name that could stand for anything."""

import ast
import re
from collections.abc import Iterable, Iterator

from tests.house.source import ROOMS, Source, python_files

_VAGUE_CLASS = re.compile(r"(Manager|Helper|Handler|Utils?)$|^Base[A-Z]")
_VAGUE_FILE = re.compile(r"(^|/)(utils?|helpers?|misc)\.py$")


def vague_names(sources: Iterable[Source]) -> Iterator[str]:
    for source in sources:
        if _VAGUE_FILE.search(source.path):
            yield source.path
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef) and _VAGUE_CLASS.search(node.name):
                yield f"{source.path}:{node.lineno}: {node.name}"


def test_nothing_is_called_manager_helper_handler_or_util() -> None:
    assert list(vague_names(python_files(*ROOMS, "tests"))) == []


def test_vague_names_are_found() -> None:
    sources = [Source("a/utils.py", "class Block: ..."), Source("b.py", "class BlockManager: ...")]
    assert list(vague_names(sources)) == ["a/utils.py", "b.py:1: BlockManager"]
