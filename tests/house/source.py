"""The project's own source files, parsed."""

import ast
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
ROOMS = ("common", "kv_transfer", "prefill_node", "decode_node", "coordinator")


@dataclass(frozen=True)
class Source:
    path: str
    text: str

    @property
    def num_lines(self) -> int:
        return len(self.text.splitlines())

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)


@cache
def python_files(*folders: str) -> tuple[Source, ...]:
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return tuple(Source(str(path.relative_to(ROOT)), path.read_text()) for path in paths)
