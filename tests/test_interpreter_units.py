"""Inline PTX and the tensor core of the interpreter, against plain models written here.

Every instruction of the evaluator's integer set runs on random operands and on the corners of its
type.  Conversions between e4m3 and fp16 run on every code and every fp16, products and comparisons
of fp16 on random and special ones.  What dispatch makes of them, four e4m3 times a power of two,
runs on every code in every byte and every power that can matter.  The tensor core runs on values
whose sums are not exact, in several tile shapes and splits of K, because a row must have the same
bits in all of them.
"""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from exact_e4m3 import E4M3, e4m3_exactly, rebase_grid, rebased
from test_interpreter import run

from megamoe import formats
from megamoe.interpreter import KernelError
from megamoe.interpreter import dtypes as dt
from megamoe.interpreter.mma import multiply_accumulate
from megamoe.kernel import dispatch
from megamoe.kernel.compat import gl, gluon

# --- inline PTX -----------------------------------------------------------------------------------


@gluon.jit
def ptx_kernel(a, b, out, ASM: gl.constexpr):
    i = gl.arange(0, 64)
    x = gl.inline_asm_elementwise(
        ASM, "=r,r,r", [gl.load(a + i), gl.load(b + i)], dtype=gl.int32, is_pure=True, pack=1
    )
    gl.store(out + i, x)


def prmt(a, b, c):
    pool = [(a >> 8 * k) & 255 for k in range(4)] + [(b >> 8 * k) & 255 for k in range(4)]
    out = 0
    for k in range(4):
        n = (c >> 4 * k) & 15
        byte = pool[n & 7]
        out |= (byte if n < 8 else 255 * (byte >> 7)) << 8 * k
    return out


def signed(x):
    x &= 0xFFFFFFFF
    return x - (1 << 32) if x >> 31 else x


PTX = {
    "add.s32 $0, $1, $2;": lambda a, b: a + b,
    "sub.u32 $0, $1, $2;": lambda a, b: a - b,
    "mul.lo.u32 $0, $1, $2;": lambda a, b: a * b,
    "mul.hi.u32 $0, $1, $2;": lambda a, b: (a * b) >> 32,
    "mul.hi.s32 $0, $1, $2;": lambda a, b: (signed(a) * signed(b)) >> 32,
    "mad.lo.s32 $0, $1, $2, 77;": lambda a, b: a * b + 77,
    "and.b32 $0, $1, 0x77777777;": lambda a, b: a & 0x77777777,
    "{ .reg .b32 t; or.b32 t, $1, $2; xor.b32 t, t, 5; not.b32 $0, t; }": lambda a, b: (
        ~((a | b) ^ 5)
    ),
    "shl.b32 $0, $1, 5;": lambda a, b: a << 5,
    "{ .reg .b32 n; and.b32 n, $2, 63; shr.u32 $0, $1, n; }": lambda a, b: (
        a >> (b & 63) if b & 63 < 32 else 0
    ),
    "shr.s32 $0, $1, 3;": lambda a, b: signed(a) >> 3,
    "prmt.b32 $0, $1, $2, 0x7531;": lambda a, b: prmt(a, b, 0x7531),
    "prmt.b32 $0, $1, 0x80ff0176, $2;": lambda a, b: prmt(a, 0x80FF0176, b),
    "lop3.b32 $0, $1, $2, 0x0f0f0f0f, 0xEA;": lambda a, b: (a & b) | 0x0F0F0F0F,
    "lop3.b32 $0, $1, $2, 0x12345678, 0x96;": lambda a, b: a ^ b ^ 0x12345678,
    "min.s32 $0, $1, $2;": lambda a, b: min(signed(a), signed(b)),
    "max.u32 $0, $1, $2;": lambda a, b: max(a, b),
    "{ .reg .pred p; setp.lt.s32 p, $1, $2; selp.b32 $0, $1, $2, p; }": lambda a, b: (
        a if signed(a) < signed(b) else b
    ),
    "{ .reg .pred p; setp.hi.u32 p, $1, $2; mov.b32 $0, 1; @p mov.b32 $0, 2;"
    " @!p add.u32 $0, $0, 8; }": lambda a, b: 2 if a > b else 9,
    "{ .reg .b64 w; mul.wide.u32 w, $1, $2; add.u64 w, w, 3; cvt.u32.u64 $0, w; }": lambda a, b: (
        a * b + 3
    ),
    "{ .reg .pred p; setp.eq.u32 p, $2, $2; @p bra end; add.u32 $1, $1, 1;"
    " end: mov.b32 $0, $1; }": lambda a, b: a,
    "{ .reg .b32 n; mov.b32 $0, 0; and.b32 n, $2, 15; up: add.u32 $0, $0, $1; sub.s32 n, n, 1;"
    " .reg .pred p; setp.ge.s32 p, n, 0; @p bra up; }": lambda a, b: a * ((b & 15) + 1),
    "popc.b32 $0, $1;": lambda a, b: bin(a).count("1"),
    "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.u32.u16 $0, h; }": lambda a, b: a & 0xFFFF,
    # a branch: one lane at a time, on Python's numbers
    "{ .reg .pred p; setp.eq.u32 p, $2, $2; @p bra end; end: popc.b32 $0, $1; }": lambda a, b: bin(
        a
    ).count("1"),
}


@pytest.mark.parametrize("asm", PTX)
def test_ptx_instructions(asm):
    rng = np.random.default_rng(6)
    a, b = rng.integers(0, 1 << 32, (2, 64), dtype=np.uint64).astype(np.uint32)
    a[:4], b[:4] = [0, 1, 0xFFFFFFFF, 0x80000000], [0xFFFFFFFF, 0, 0x80000000, 31]
    out = np.zeros(64, np.int32)
    run(ptx_kernel, [(a, "int32"), (b, "int32"), out], ASM=asm)
    want = [PTX[asm](int(x), int(y)) & 0xFFFFFFFF for x, y in zip(a, b, strict=True)]
    np.testing.assert_array_equal(out.view(np.uint32), np.array(want, np.uint32))


@gluon.jit
def pack_kernel(words, small, out_a, out_b, R: gl.constexpr):
    """Two results of one byte each, from packed bytes and one word an element."""
    i = gl.arange(0, R)[:, None]
    j = gl.arange(0, 32)[None, :]
    w = gl.load(words + i * 32 + j)
    d = gl.load(small + gl.arange(0, R))[:, None] + gl.zeros((R, 32), gl.int32)
    x, y = gl.inline_asm_elementwise(
        "{ .reg .b32 t; and.b32 t, $2, 0x0f0f0f0f; mad.lo.u32 $0, $3, 0x01010101, t;"
        " xor.b32 $1, $2, $6; }",
        "=r,=r,r,r,r,r,r",
        [w, d],
        dtype=(gl.int8, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )
    gl.store(out_a + i * 32 + j, x)
    gl.store(out_b + i * 32 + j, y)


def test_packed_registers():
    rng = np.random.default_rng(8)
    w = rng.integers(-128, 128, (4, 32), dtype=np.int8)
    d = np.array([0, 1, 2, 3], np.int32)
    a, b = np.zeros((4, 32), np.int8), np.zeros((4, 32), np.uint8)
    run(pack_kernel, [w, d, a, (b, "float8e4nv")], R=4)
    np.testing.assert_array_equal(a, (w & 15) + d[:, None].astype(np.int8))
    first = np.zeros((4, 32), np.uint8)
    first[:, ::4] = d[:, None]
    np.testing.assert_array_equal(b, w.view(np.uint8) ^ first)


# --- fp16 and e4m3 in pairs -----------------------------------------------------------------------

TO_HALVES = "{ .reg .b16 h; cvt.u16.u32 h, $1; cvt.rn.f16x2.e4m3x2 $0, h; }"
TO_E4M3 = "{ .reg .b16 h; cvt.rn.satfinite.e4m3x2.f16x2 h, $1; cvt.u32.u16 $0, h; }"
SPECIAL = [0x0000, 0x8000, 0x0001, 0x83FF, 0x0400, 0x3C00, 0xBC01, 0x7BFF, 0x7C00, 0xFC00, 0x7E00]


def on_words(asm, a, b=None):
    """The block on any number of words, 64 at a time."""
    a = np.resize(np.asarray(a, np.uint32), -(-len(a) // 64) * 64)
    b = np.zeros_like(a) if b is None else np.resize(np.asarray(b, np.uint32), len(a))
    out = np.zeros_like(a)
    for start in range(0, len(a), 64):
        part = slice(start, start + 64)
        arrays = [np.ascontiguousarray(v[part]).view(np.int32) for v in (a, b, out)]
        run(ptx_kernel, arrays, ASM=asm)
        out[part] = arrays[2].view(np.uint32)
    return out


def half(bits):
    """A Fraction, or a float where it is none."""
    value = float(np.array(bits, np.uint16).view(np.float16))
    return Fraction(value) if np.isfinite(value) else value


def nearest_half(value):
    """Bits of the fp16 nearest to a Fraction (the even one of two), and of its sign if it is 0."""
    magnitude, place = abs(value), -24
    while magnitude >= Fraction(2) ** (place + 11):
        place += 1
    units = round(magnitude / Fraction(2) ** place)  # Python rounds ties to even
    bits = units if place == -24 else ((place + 24) << 10) + units
    return min(bits, 0x7C00) | (0x8000 if value < 0 else 0)


def test_all_e4m3_become_fp16_exactly():
    words = np.arange(1 << 16, dtype=np.uint32)
    got = on_words(TO_HALVES, words)
    want = words.astype(np.uint16).view(np.uint8).reshape(-1, 2)
    found = got.view(np.float16).reshape(-1, 2)
    np.testing.assert_array_equal(found, np.array([float(v) for v in E4M3], np.float16)[want])
    np.testing.assert_array_equal(np.signbit(found[:, 0]), want[:, 0] > 127)


def test_all_fp16_become_the_nearest_e4m3():
    every = np.arange(1 << 16, dtype=np.uint32)
    got = on_words(TO_E4M3, every | every[::-1] << 16)
    assert (got < 1 << 16).all()
    values = torch.from_numpy(every.astype(np.uint16).view(np.float16).astype(np.float32))
    want = values.clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    want = np.where(values.isnan(), 0x7F, want)
    np.testing.assert_array_equal(got & 0xFF, want)
    np.testing.assert_array_equal(got >> 8, want[::-1])
    # and by rational arithmetic, where e4m3 is not exact
    for bits in range(0x1000, 0x5F01, 13):
        assert got[bits] & 0xFF == e4m3_exactly(half(bits))


def test_products_of_fp16():
    rng = np.random.default_rng(14)
    near = rng.integers(0, 1 << 16, (2, 3000))
    small = (rng.integers(0, 1 << 10, (2, 1000)), rng.integers(0x3000, 0x3C01, (2, 1000)))
    pairs = list(itertools.product(SPECIAL, SPECIAL))
    a = np.concatenate([near[0], small[0][0], small[1][0], [x for x, _ in pairs]]).astype(np.uint32)
    b = np.concatenate([near[1], small[1][1], small[0][1], [y for _, y in pairs]]).astype(np.uint32)
    got = on_words("mul.rn.f16x2 $0, $1, $2;", a | a[::-1] << 16, b | b[::-1] << 16)
    for low, high, x, y in zip(got & 0xFFFF, (got >> 16)[: len(a)][::-1], a, b, strict=False):
        exact = half(x) * half(y)
        if isinstance(exact, Fraction):
            want = nearest_half(exact) | (0 if exact else (int(x) ^ int(y)) & 0x8000)
            assert low == high == want, (hex(x), hex(y))
        else:
            value, other = half(low), half(high)
            assert value == other == exact or exact != exact and value != value and other != other


def test_comparisons_of_fp16():
    rng = np.random.default_rng(15)
    some = rng.integers(0, 1 << 16, 500)
    pairs = list(itertools.product(SPECIAL, SPECIAL))
    a = np.concatenate([some, some, [x for x, _ in pairs]]).astype(np.uint32)
    b = np.concatenate([some, some[::-1], [y for _, y in pairs]]).astype(np.uint32)
    got = on_words("set.ne.f16x2.f16x2 $0, $1, $2;", a | a[::-1] << 16, b | b[::-1] << 16)
    for low, high, x, y in zip(got & 0xFFFF, (got >> 16)[: len(a)][::-1], a, b, strict=False):
        known = half(x) == half(x) and half(y) == half(y)
        assert low == high == (0x3C00 if known and half(x) != half(y) else 0), (hex(x), hex(y))


@pytest.mark.parametrize(
    "name",
    ["mul.f16x2", "mul.rn.sat.f16x2", "mul.ftz.rn.f16x2", "add.rn.f16x2", "set.neu.f16x2.f16x2",
     "set.ne.u32.f16x2", "max.f16x2", "mul.rn.bf16x2", "add.rn.f16"],
)  # fmt: skip
def test_other_instructions_on_fp16_are_refused(name):
    words = np.zeros(64, np.int32)
    with pytest.raises(KernelError, match=f"inline PTX: {name}"):
        run(ptx_kernel, [words, words.copy(), words.copy()], ASM=f"{name} $0, $1, $2;")


@pytest.mark.parametrize(
    "name", ["cvt.rn.e4m3x2.f16x2", "cvt.rn.satfinite.relu.e4m3x2.f16x2", "cvt.rn.f16x2.e5m2x2"]
)
def test_other_conversions_of_pairs_are_refused(name):
    words = np.zeros(64, np.int32)
    with pytest.raises(KernelError, match=f"inline PTX: {name}"):
        run(ptx_kernel, [words, words.copy(), words.copy()], ASM=f"{name} $0, $1;")


# --- four e4m3 times a power of two, as dispatch does it ------------------------------------------


def test_rebase_against_rational_arithmetic():
    """Every code in every byte of a word, every shift: the values, and how many of four changed."""
    words, shifts, codes, changed = rebase_grid()
    got, some = rebased(dispatch.rebase, words, shifts)
    np.testing.assert_array_equal(got, codes)
    np.testing.assert_array_equal(some, changed)
    # NaN stays, is no change, and -0 keeps its sign
    nan = (words & 0x7F) == 0x7F
    assert nan.any() and ((got[nan] & 0x7F) == 0x7F).all()
    zero = words == 0x80
    assert zero.any() and (got[zero] == 0x80).all()


def test_rebase_against_formats():
    words, shifts, _, _ = rebase_grid()
    got, some = rebased(dispatch.rebase, words, shifts)
    for row, shift in enumerate(shifts):
        values = formats.decode_e4m3(torch.from_numpy(words[row].astype(np.uint8)))
        wanted, inexact = formats.shift_e4m3(values, torch.tensor(-int(shift)))
        wanted = wanted.float().numpy()
        np.testing.assert_array_equal(dt.E4M3_32[got[row]], wanted)
        known = ~np.isnan(wanted)
        signs = (np.signbit(v)[known] for v in (dt.E4M3_32[got[row]], wanted))
        np.testing.assert_array_equal(*signs)
        assert some[row].sum() == inexact


# --- the tensor core ------------------------------------------------------------------------------


def step_by_step(a, b, step):
    """fp32 accumulator; the products of one step summed in float64 without error (math.fsum)."""
    import math

    out = np.zeros((a.shape[0], b.shape[1]), np.float32)
    for i in range(a.shape[0]):
        for j in range(b.shape[1]):
            acc = np.float32(0)
            for k in range(0, a.shape[1], step):
                acc = np.float32(
                    math.fsum(a[i, k : k + step] * b[k : k + step, j]) + np.float64(acc)
                )
            out[i, j] = acc
    return out


@pytest.mark.parametrize("wide", [False, True])
def test_products_of_e4m3_and_bf16(wide):
    rng = np.random.default_rng(9)
    spread = 2.0 ** rng.integers(-30 if wide else -4, 30 if wide else 4, (2, 8, 64))
    for dtype, step in ((dt.float8e4nv, 32), (dt.bfloat16, 16)):
        a, b = (rng.standard_normal((2, 8, 64)) * spread).astype(np.float32)
        a, b = (dt.encode(dt.convert(x, dt.float32, dtype), dtype) for x in (a, b))
        b = b.T.copy()
        want = step_by_step(dt.to_float64(a, dtype), dt.to_float64(b, dtype), step)
        np.testing.assert_array_equal(multiply_accumulate(a, b, None, dtype), want)


@pytest.mark.parametrize("dtype", [dt.float8e4nv, dt.bfloat16], ids=str)
def test_product_of_a_row_does_not_depend_on_the_tile(dtype):
    rng = np.random.default_rng(10)
    x = rng.standard_normal((96, 256)) * 2.0 ** rng.integers(-20, 20, (96, 256))
    w = rng.standard_normal((256, 72)) * 2.0 ** rng.integers(-20, 20, (256, 72))
    a, b = (dt.encode(dt.convert(v.astype(np.float32), dt.float32, dtype), dtype) for v in (x, w))
    full = multiply_accumulate(a, b, None, dtype)
    for rows in (1, 7, 64):
        for columns in (1, 8, 64):
            np.testing.assert_array_equal(
                multiply_accumulate(a[:rows], b[:, :columns], None, dtype), full[:rows, :columns]
            )
    for cut in (32, 64, 128):
        acc = None
        for k in range(0, 256, cut):
            acc = multiply_accumulate(a[:, k : k + cut], b[k : k + cut], acc, dtype)
        np.testing.assert_array_equal(acc, full)


def test_nan_and_infinity_stay_in_their_row():
    rng = np.random.default_rng(12)
    x = rng.standard_normal((8, 64)).astype(np.float32) * 2.0 ** rng.integers(-30, 30, (8, 64))
    clean = dt.encode(dt.bf16_round(x.astype(np.float32)), dt.bfloat16)
    b = dt.encode(dt.bf16_round(rng.standard_normal((64, 8)).astype(np.float32)), dt.bfloat16)
    dirty = clean.copy()
    dirty[3, 5], dirty[6, 0] = 0x7FC0, 0x7F80
    with np.errstate(invalid="ignore"):
        got = multiply_accumulate(dirty, b, None, dt.bfloat16)
    assert np.isnan(got[3]).all() and not np.isfinite(got[6]).any()
    rest = [0, 1, 2, 4, 5, 7]
    np.testing.assert_array_equal(got[rest], multiply_accumulate(clean, b, None, dt.bfloat16)[rest])
