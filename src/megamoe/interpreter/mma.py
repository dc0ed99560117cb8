"""The tensor core's arithmetic, with results that do not depend on the shape of the tile.

A product runs in steps of one instruction, 32 bytes of K.  The products of a step are summed in
float64, added to the fp32 accumulator in float64, and rounded once to fp32.  Sums of e4m3 products
are exact in float64.  Sums of bfloat16 products need not be, and a matrix library may order them by
the shape: they are split so that the part that decides is exact.
"""

from __future__ import annotations

import numpy as np

from . import dtypes as dt
from .dtypes import DType

STEP_BYTES = 32


def multiply_accumulate(
    a: np.ndarray, b: np.ndarray, acc: np.ndarray | None, dtype: DType
) -> np.ndarray:
    """fp32 `acc + a @ b` of memory-format arrays a [M, K] and b [K, N]; acc None counts as zero."""
    step = STEP_BYTES // dtype.itemsize
    m, k = a.shape
    n = b.shape[1]
    left = dt.to_float64(a, dtype).reshape(m, k // step, step).transpose(1, 0, 2)
    right = dt.to_float64(b, dtype).reshape(k // step, step, n)
    sums = np.matmul(left, right) if dtype.bits == 8 else _shape_independent(left, right)
    if acc is None:
        acc = np.zeros((m, n), np.float32)
    for part in sums:
        acc = np.add(part, acc, out=part).astype(np.float32)
    return acc


def _shape_independent(left: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Sums of at most 16 products of bfloat16 values (8 significant bits each), the same in every
    tile.
    """
    big, small = _extremes(left)
    big2, small2 = _extremes(right)
    # Multiples of 2^(e_min - 7) below 2^(e_max + 1): exact while both ranges and 20 bits fit in 53.
    if big / small * (big2 / small2) < 2.0**32:
        return np.matmul(left, right)
    bad_left, bad_right = ~np.isfinite(left), ~np.isfinite(right)
    special = bad_left.any() or bad_right.any()
    if special:
        direct = np.matmul(left, right)
        touched = bad_left.any(axis=2, keepdims=True) | bad_right.any(axis=1, keepdims=True)
        left, right = np.where(bad_left, 0.0, left), np.where(bad_right, 0.0, right)
    left_high, left_low = _split(left, 2)
    right_high, right_low = _split(right, 1)
    out = np.matmul(left_high, right_high)
    if left_low.any() or right_low.any():
        out += np.matmul(left_high, right_low) + np.matmul(left_low, right)
    return np.where(touched, direct, out) if special else out


def _extremes(x: np.ndarray) -> tuple[float, float]:
    mag = np.abs(x)
    big = float(mag.max(initial=0.0))
    if not np.isfinite(big):
        return np.inf, 1.0
    mag[mag == 0.0] = np.inf
    small = float(mag.min(initial=np.inf))
    return (big, small) if np.isfinite(small) else (1.0, 1.0)


def _split(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """x = high + low, high a multiple of 2^-23 of the power of two of its row's (column's) largest
    value.
    """
    top = np.abs(x).max(axis=axis, keepdims=True)
    _, exponent = np.frexp(top)
    grid = np.ldexp(1.5, exponent - 1 + 52 - 23)
    high = (x + grid) - grid
    return high, x - high
