"""Inline PTX and the tensor core of the interpreter, against plain models written here.

Every instruction of the evaluator's integer set runs on random operands and on the corners of its
type.  The tensor core runs on values whose sums are not exact, in several tile shapes and splits
of K, because a row must have the same bits in all of them.
"""

import numpy as np
import pytest
from test_interpreter import run

from megamoe.interpreter import dtypes as dt
from megamoe.interpreter.mma import multiply_accumulate
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
