"""Compiles the attention kernels for GPUs that need not be there and prints what came out, as JSON.

    TRITON_INTERPRET=0 python -m tests.unit.common.attention.compile_for_gpu 90 bfloat16 64

The arguments: compute capability, type of query and pool, head dimension. One object a kernel: instructions counted
in its PTX, shared memory in bytes, size of the binary.
"""

import json
import sys
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from common.attention import triton_kernels
from common.attention.base import AttentionBatch, LayerSpec
from common.attention.triton import DECODE_ROWS, LAUNCH, PREFILL_ROWS, TritonAttention

TYPES = {"float32": "*fp32", "bfloat16": "*bf16", "float16": "*fp16"}
INSTRUCTIONS = ("mma.sync", "wgmma.mma_async", "fma.rn.f32", "cp.async.c")
ARGUMENTS = {
    "starts": "*i32",
    "context_lens": "*i32",
    "tables": "*i32",
    "sinks": "*fp32",
    "part_m": "*fp32",
    "part_mass": "*fp32",
    "part": "*fp32",
    "scale": "fp32",
}
ODD = ("num_seqs", "num_splits", "table_stride")  # integers that need not be multiples of 16


def compiled(kernel: Any, dtype: str, capability: int, constants: dict[str, Any]) -> dict[str, Any]:
    names = kernel.arg_names
    types = {**dict.fromkeys(("query", "out", "pool"), TYPES[dtype]), **ARGUMENTS}
    signature = {name: "constexpr" if name in constants else types.get(name, "i32") for name in names}
    aligned = [name for name in names if name not in constants and name not in ODD and name != "scale"]
    source = ASTSource(
        kernel,
        signature,
        {(names.index(name),): value for name, value in constants.items()},
        {(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    found = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=LAUNCH)
    ptx = found.asm["ptx"]
    return {
        "kernel": kernel.__name__,
        **{name: ptx.count(name) for name in INSTRUCTIONS},
        "shared": found.metadata.shared,
        "bytes": len(found.asm["cubin"]),
    }


def main(capability: int, dtype: str, head_dim: int) -> None:
    layer = LayerSpec(0, 8, 2, head_dim, head_dim, 0, 2 * 16 * head_dim, head_dim**-0.5)
    none = torch.empty(0, dtype=torch.int32)
    pool = torch.empty(1, 4 * 16 * head_dim, dtype=getattr(torch, dtype), device="meta")
    batch = AttentionBatch(pool, 16, none, none, none, none, none)
    shape = TritonAttention().shape(layer, pool.dtype, batch)
    rows = {"SKIP_SINGLE": True, "SINKS": False, "ROWS": PREFILL_ROWS, **shape}
    split = {"GROUP_TILES": 1, **shape, "ROWS": DECODE_ROWS}
    merge = {
        "NUM_HEADS": 8,
        "SINKS": False,
        "HEADS": 4,
        **{n: shape[n] for n in ("V_DIM", "V_PAD", "WINDOW", "TILE", "SPLIT")},
    }
    kernels = triton_kernels
    print(
        json.dumps(
            [
                compiled(kernel, dtype, capability, constants)
                for kernel, constants in (
                    (kernels.attend_rows, rows),
                    (kernels.attend_split, split),
                    (kernels.combine, merge),
                )
            ]
        )
    )


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], int(sys.argv[3]))
