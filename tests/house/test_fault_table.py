"""The table of others' failures names tests that exist."""

import ast
import re

from tests.house.source import ROOT, python_files

TABLE = ROOT / "tests" / "faults" / "README.md"
_TEST = re.compile(r"`([\w/]+\.py)::(\w+)`")
MIN_TESTS = 40


def test_every_test_that_the_table_names_exists() -> None:
    defined = {
        (source.path.removeprefix("tests/"), node.name)
        for source in python_files("tests")
        for node in source.tree.body
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    named = set(_TEST.findall(TABLE.read_text()))
    assert len(named) > MIN_TESTS
    assert named - defined == set()
