"""e4m3 by rational arithmetic, and dispatch's four of them at a time against it."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import lru_cache

import numpy as np

from megamoe.interpreter.dtypes import int32
from megamoe.interpreter.rebind import rebind
from megamoe.interpreter.values import Tensor

NAN = 0x7F
GRID = [  # magnitudes by code: three bits of mantissa, the exponent's bias is 7, subnormal below
    Fraction(m if e == 0 else 8 + m) * Fraction(2) ** (max(e, 1) - 10)
    for e in range(16)
    for m in range(8)
][:NAN]
# by code; NaN where there is no number
E4M3 = [*GRID, float("nan"), *(-v for v in GRID), float("nan")]


def e4m3_exactly(value: Fraction) -> int:
    """The code nearest to `value`: of two the even one, 448 beyond it, no sign of a zero."""
    magnitude = abs(value)
    best = min(range(NAN), key=lambda code: (abs(GRID[code] - magnitude), code % 2))
    return best | (0x80 if value < 0 else 0)


@lru_cache
def rebase_grid() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """(codes [shifts, 256 words, 4], shifts, the right codes of value * 2^-shift, how many of the
    four in a word that are not exact).

    Every code comes in every byte of a word, with other codes beside it; shifts of 0 to 40, past
    the last that matters (19), and the largest that two scales can be apart.
    """
    n = np.arange(256)
    words = np.stack([n, (5 * n + 77) % 256, 255 - n, (9 * n + 130) % 256], axis=1)
    shifts = np.array([*range(41), 127, 254])
    right = np.zeros((len(shifts), 256), np.int64)
    changed = np.zeros((len(shifts), 256), bool)
    for row, shift in enumerate(shifts):
        for code, value in enumerate(E4M3):
            if value != value:
                right[row, code] = NAN
                continue
            exact = value / Fraction(2) ** int(shift)
            found = e4m3_exactly(exact)
            changed[row, code] = E4M3[found] != exact
            right[row, code] = found & 0x7F | code & 0x80
    every = np.broadcast_to(words, (len(shifts), 256, 4))
    return every, shifts, right[:, words], changed[:, words].sum(-1)


def rebased(rebase: Callable, words: np.ndarray, shifts: np.ndarray) -> tuple:
    """What the kernel's `rebase` makes of that grid: codes [shifts, 256, 4], changed."""
    packed = np.ascontiguousarray(words, np.uint8).view(np.int32)[..., 0]
    by_word = np.broadcast_to(shifts[:, None], packed.shape).astype(np.int32)
    with np.errstate(invalid="ignore"):  # infinity times 0, in mutations
        moved, changed = rebind(rebase)(Tensor(packed, int32), Tensor(by_word, int32))
    codes = np.ascontiguousarray(moved.v, np.int32).view(np.uint8)
    return codes.reshape(words.shape).astype(np.int64), np.asarray(changed.v)
