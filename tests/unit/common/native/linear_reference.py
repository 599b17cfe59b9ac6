"""The kernel's arithmetic in numpy, operation by operation: the same bits, slowly."""

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
GROUP = 32


def fma(a: Floats, b: Floats, c: Floats) -> Floats:
    """a * b + c rounded once: in float64 the product is exact, and the sum is rounded to odd before float32."""
    product = a.astype(np.float64) * b.astype(np.float64)
    addend = c.astype(np.float64)
    total = product + addend
    part = total - product
    lost = (product - (total - part)) + (addend - part)  # exactly what rounding the sum dropped
    even = (total.view(np.int64) & 1) == 0
    towards = np.nextafter(total, np.where(lost > 0, np.inf, -np.inf))
    return np.where((lost != 0) & even, towards, total).astype(np.float32)


def float_product(x: Floats, weight: Floats) -> Floats:
    """[rows, n]: one chain over k from 0."""
    y = np.zeros((x.shape[0], weight.shape[0]), np.float32)
    for k in range(x.shape[1]):
        y = fma(np.broadcast_to(x[:, k : k + 1], y.shape), weight[:, k], y)
    return y


def quantised_product(x: Floats, values: npt.NDArray[np.uint8], scales: Floats, minimums: Floats) -> Floats:
    """[rows, n] from values [n, k], scales and minimums [n, k / 32]: one chain over the groups from 0."""
    y = np.zeros((x.shape[0], values.shape[0]), np.float32)
    for g in range(values.shape[1] // GROUP):
        part = slice(g * GROUP, (g + 1) * GROUP)
        a, s, t = quantised_group(x[:, part])
        dot = a.astype(np.int32) @ values[:, part].T.astype(np.int32)
        y = fma(dot.astype(np.float32), scales[None, :, g] * s[:, None], y)
        y = fma(np.broadcast_to(minimums[None, :, g], y.shape), np.broadcast_to(t[:, None], y.shape), y)
    return y


def quantised_group(x: Floats) -> tuple[npt.NDArray[np.int16], Floats, Floats]:
    """Integers [rows, 32], s [rows] and t [rows] of one group of activations [rows, 32]."""
    steps = np.abs(x).reshape(-1, 8, 4).max(2)
    is_high = np.arange(8) == 7 - steps[:, ::-1].argmax(1)[:, None]  # the last of the largest
    s = np.where(is_high, steps * np.float32(2**-7), steps).max(1) / np.float32(127)
    quotient = np.divide(x, s[:, None], out=np.zeros_like(x), where=s[:, None] != 0)
    limit = np.where(is_high, 127 * 128, 127).repeat(4, 1).astype(np.float32)
    a = np.rint(np.clip(quotient, -limit, limit)).astype(np.int16)
    return a, s, s * a.sum(1, dtype=np.int32).astype(np.float32)
