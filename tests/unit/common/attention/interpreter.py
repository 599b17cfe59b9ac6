"""Triton's interpreter, computing as a GPU does where NumPy does not.

- A row of `tl.dot` has the same bits wherever it stands in the matrix; NumPy sums it in another order elsewhere.
- float32 becomes bfloat16 by rounding to the nearest; the interpreter cuts the low bits off.
- Nobody checks integers for overflow, which costs the interpreter half its time.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest


@contextmanager
def like_a_gpu() -> Iterator[None]:
    """Within this context. Nothing where triton is not installed."""
    if find_spec("triton") is None:
        yield
        return
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, interpreter_builder

    cut = InterpreterBuilder.cast_impl

    def create_dot(_: Any, a: Any, b: Any, acc: Any, *__: Any) -> Any:
        out = np.zeros_like(acc.data)
        for k in range(a.data.shape[1]):
            out += a.data[:, k, None] * b.data[None, k, :]
        return TensorHandle(out + acc.data, acc.dtype.scalar)

    def cast_impl(self: Any, source: Any, target: Any) -> Any:
        if source.dtype.scalar != tl.float32 or target.scalar != tl.bfloat16:
            return cut(self, source, target)
        bits = np.ascontiguousarray(source.data).view(np.uint32)
        rounded = ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
        return TensorHandle(np.where(np.isnan(source.data), np.uint16(0x7FC0), rounded), tl.bfloat16)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_dot", create_dot)
        patch.setattr(InterpreterBuilder, "cast_impl", cast_impl)
        patch.setattr(interpreter_builder, "options", replace(interpreter_builder.options, sanitize_overflow=False))
        yield
