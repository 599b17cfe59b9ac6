"""The structs of csrc/{abi,program,loans}.h, field by field: how Python hands the kernels what is fixed for a layer, a
model or a step, so that a call passes a few pointers."""

import ctypes
from collections.abc import Sequence
from enum import IntEnum

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.generic]


class WeightKind(IntEnum):
    """How a packed weight is stored: `Kind` of csrc/linear.h."""

    F32 = 0
    BF16 = 1
    Q8 = 2
    Q4 = 3


class OpCode(IntEnum):
    """`Code` of csrc/program.h, which says what each does."""

    EMBED = 0
    NORM = 1
    LINEAR = 2
    ROTATE = 3
    ATTEND = 4
    GATE = 5
    ADD = 6
    GATHER = 7
    SOFTCAP = 8
    SCALE = 9


class Activation(IntEnum):
    SILU = 0
    GELU_TANH = 1


class LayerArgs(ctypes.Structure):
    _fields_ = (
        ("k_offset", ctypes.c_int64),
        ("v_offset", ctypes.c_int64),
        ("sinks", ctypes.c_void_p),
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("k_dim", ctypes.c_int32),
        ("v_dim", ctypes.c_int32),
        ("window", ctypes.c_int32),
        ("pool_is_bf16", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
    )


class BatchArgs(ctypes.Structure):
    _fields_ = (
        ("pool", ctypes.c_void_p),
        ("block_stride", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("context_lens", ctypes.c_void_p),
        ("block_tables", ctypes.c_void_p),
        ("row_blocks", ctypes.c_void_p),
        ("row_offsets", ctypes.c_void_p),
        ("table_stride", ctypes.c_int64),
        ("num_seqs", ctypes.c_int32),
        ("num_rows", ctypes.c_int32),
        ("block_size", ctypes.c_int32),
    )


class RowsArgs(ctypes.Structure):
    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("query_token", ctypes.c_int64),
        ("query_head", ctypes.c_int64),
        ("key_token", ctypes.c_int64),
        ("key_head", ctypes.c_int64),
        ("value_token", ctypes.c_int64),
        ("value_head", ctypes.c_int64),
        ("num_tokens", ctypes.c_int32),
        ("is_bf16", ctypes.c_int32),
    )


class LinearArgs(ctypes.Structure):
    _fields_ = (
        ("kind", ctypes.c_int32),
        ("n", ctypes.c_int32),
        ("k", ctypes.c_int32),
        ("data", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("minimums", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
    )


class OpArgs(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_int32),
        ("src", ctypes.c_int32),
        ("dst", ctypes.c_int32),
        ("index", ctypes.c_int32),
        ("value", ctypes.c_float),
        ("add", ctypes.c_int32),
    )


class RotationArgs(ctypes.Structure):
    _fields_ = (
        ("num_heads", ctypes.c_int32),
        ("num_kv_heads", ctypes.c_int32),
        ("dim", ctypes.c_int32),
        ("rotary_dim", ctypes.c_int32),
        ("table", ctypes.c_int32),
        ("epsilon", ctypes.c_float),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
    )


class ProgramArgs(ctypes.Structure):
    _fields_ = (
        ("ops", ctypes.c_void_p),
        ("linears", ctypes.c_void_p),
        ("layers", ctypes.c_void_p),
        ("norms", ctypes.c_void_p),
        ("rotations", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("num_ops", ctypes.c_int32),
        ("num_buffers", ctypes.c_int32),
        ("logits", ctypes.c_int32),
    )


class LoansArgs(ctypes.Structure):
    _fields_ = (
        ("cores", ctypes.c_void_p),
        ("owners", ctypes.c_void_p),
        ("count", ctypes.c_int32),
        ("fd", ctypes.c_int32),
        ("borrowed_ns", ctypes.c_int64),
    )


class StepArgs(ctypes.Structure):
    _fields_ = (
        ("batch", BatchArgs),
        ("ids", ctypes.c_void_p),
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("logit_rows", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("spent_ns", ctypes.c_void_p),
        ("loans", ctypes.c_void_p),
        ("num_logits", ctypes.c_int32),
        ("threads", ctypes.c_int32),
    )


def pointers(arrays: Sequence[Array]) -> "ctypes.Array[ctypes.c_void_p]":
    """A C array of their addresses; the arrays must outlive its use."""
    return (ctypes.c_void_p * len(arrays))(*(array.ctypes.data for array in arrays))
