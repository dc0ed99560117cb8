"""Loads, stores, atomics and TMA copies of the interpreter, on random patterns.

Memory accesses are tried on random shapes, strides and masks, because their fast paths are chosen
by pattern: rows, columns, both, neither, three dimensions, one buffer or several, and masks that
cut rectangles or not; TMA boxes lie inside and over every edge.
"""

import numpy as np
import pytest
from test_interpreter import run

from megamoe.interpreter import Machine, Misaligned
from megamoe.kernel.compat import (
    cta_barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_load,
)

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global


# --- loads and stores -----------------------------------------------------------------------------


@gluon.jit
def tile_kernel(
    source,
    target,
    s0,
    s1,
    t0,
    t1,
    row_lo,
    row_hi,
    column_lo,
    column_hi,
    HOW: gl.constexpr,
    R: gl.constexpr,
    C: gl.constexpr,
):
    i = gl.arange(0, R)
    j = gl.arange(0, C)
    rows = (i >= row_lo) & (i < row_hi)
    columns = (j >= column_lo) & (j < column_hi)
    src = source + i[:, None] * s0 + j[None, :] * s1
    dst = target + (i[:, None] * t0 + j[None, :] * t1)
    if HOW == "none":
        gl.store(dst, gl.load(src))
    if HOW == "rows":
        gl.store(dst, gl.load(src, mask=rows[:, None], other=-1), mask=rows[:, None])
    if HOW == "columns":
        gl.store(dst, gl.load(src, mask=columns[None, :], other=-1), mask=columns[None, :])
    if HOW == "both":
        mask = rows[:, None] & columns[None, :]
        gl.store(dst, gl.load(src, mask=mask, other=-1))
    if HOW == "either":
        mask = rows[:, None] | columns[None, :]
        gl.store(dst, gl.load(src, mask=mask, other=-1), mask=mask)


@pytest.mark.parametrize("how", ["none", "rows", "columns", "both", "either"])
@pytest.mark.parametrize("dtype", [np.int32, np.int8, np.int64])
def test_tiles(how, dtype):
    rng = np.random.default_rng(11)
    for r, c in ((1, 8), (8, 1), (4, 8), (8, 16)):
        for _ in range(8):
            s = [(c, 1), (1, r), (2 * c + 3, 2), (c + 5, 1)][rng.integers(4)]
            t = [(c, 1), (1, r), (3 * c, 3), (1, r + 2)][rng.integers(4)]
            lo, hi = sorted(rng.integers(0, r + 1, 2).tolist())
            clo, chi = sorted(rng.integers(0, c + 1, 2).tolist())
            source = rng.integers(0, 100, 400).astype(dtype)
            target = np.full(500, 77, dtype)
            run(tile_kernel, [source, target], *s, *t, lo, hi, clo, chi, HOW=how, R=r, C=c)
            want = np.full(500, 77, dtype)
            for i in range(r):
                for j in range(c):
                    inside = {
                        "none": True,
                        "rows": lo <= i < hi,
                        "columns": clo <= j < chi,
                        "both": lo <= i < hi and clo <= j < chi,
                        "either": lo <= i < hi or clo <= j < chi,
                    }[how]
                    if inside:
                        want[i * t[0] + j * t[1]] = source[i * s[0] + j * s[1]]
                    elif how == "both":
                        want[i * t[0] + j * t[1]] = -1
            np.testing.assert_array_equal(
                target, want, err_msg=f"{r} {c} {s} {t} {lo} {hi} {clo} {chi}"
            )


@gluon.jit
def gather_kernel(table, index, out, limit, R: gl.constexpr, C: gl.constexpr):
    """Rows at addresses that a table names, in several buffers."""
    i = gl.arange(0, R)
    j = gl.arange(0, C)
    live = i < limit
    address = gl.load(table + gl.load(index + i))
    rows = address.to(gl.pointer_type(gl.int32), bitcast=True)
    x = gl.load(rows[:, None] + j[None, :], mask=live[:, None], other=0)
    gl.store(out + i[:, None] * C + j[None, :], x)
    gl.store(rows + j.reshape((C,)).to(gl.int32).reshape(R) * 0, i * 100, mask=live)


@pytest.mark.parametrize("limit", [0, 5, 8])
def test_rows_in_several_buffers(limit):
    m = Machine(ranks=3)
    arrays = [np.arange(64, dtype=np.int32) + 1000 * r for r in range(3)]
    buffers = [m.register(r, a, name=f"rank{r}") for r, a in enumerate(arrays)]
    before = [a.copy() for a in arrays]
    table = np.array([buffers[k % 3].address + 32 * (k // 3) for k in range(24)], np.int64)
    index = np.array([3, 1, 4, 9, 5, 22, 6, 14], np.int32)
    out = np.zeros((8, 8), np.int32)
    p = [
        m.pointer(m.register(0, table), "int64"),
        m.pointer(m.register(0, index), "int32"),
        m.pointer(m.register(0, out), "int32"),
    ]
    m.enqueue(0, gather_kernel, grid=1, args=[*p, limit], kwargs={"R": 8, "C": 8})
    m.run()
    for row, k in enumerate(index):
        want = before[k % 3][8 * (k // 3) :][:8] if row < limit else np.zeros(8)
        np.testing.assert_array_equal(out[row], want)
        if row < limit:
            assert arrays[k % 3][8 * (k // 3)] == row * 100


@gluon.jit
def cube_kernel(source, target, limit):
    i = gl.arange(0, 4)[:, None, None]
    j = gl.arange(0, 2)[None, :, None]
    k = gl.arange(0, 16)[None, None, :]
    x = gl.load(source + i * 64 + j * 32 + k, mask=i < limit, other=9)
    gl.store(target + i * 64 + (j * 16 + k), x, mask=(k < 12) & (i != 1))


def test_three_dimensions():
    source, target = np.arange(256, dtype=np.int32), np.zeros(256, np.int32)
    run(cube_kernel, [source, target], 3)
    x = source.reshape(4, 2, 32)[:, :, :16].copy()
    x[3] = 9
    x[1], x[:, :, 12:] = 0, 0
    np.testing.assert_array_equal(target.reshape(4, 4, 16)[:, :2], x)


@gluon.jit
def neighbours_kernel(out, N: gl.constexpr, TOGETHER: gl.constexpr):
    """Programs write bytes that lie between each other's."""
    p = gl.program_id(0)
    i = gl.arange(0, N)
    if TOGETHER:
        gl.store(out + i * gl.num_programs(0) + p, (i + p).to(gl.int8))
    else:
        gl.store(out + p * N + i, (i + p).to(gl.int8))
    gl.store(out + 1024 + p, p.to(gl.int8))


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("n", [1, 4, 32])
def test_neighbouring_bytes_are_no_race(n, together):
    out = np.zeros(2048, np.int8)
    run(neighbours_kernel, [out], grid=5, N=n, TOGETHER=together)
    p, i = np.arange(5)[:, None], np.arange(n)
    want = (i + p).T.ravel() if together else (i + p).ravel()
    np.testing.assert_array_equal(out[: 5 * n], want)
    np.testing.assert_array_equal(out[1024:1029], np.arange(5))


@gluon.jit
def atomics_kernel(counters, index, old, extra):
    i = gl.arange(0, 32)
    where = gl.load(index + i)
    gl.store(old + i, gl.atomic_add(counters + where, i * 0 + 2, mask=i < 30, sem="relaxed"))
    gl.atomic_max(extra, 5)
    gl.store(old + 32, gl.atomic_cas(extra, 5, 8))
    gl.store(old + 33, gl.atomic_cas(extra, 5, 9))
    gl.store(old + 34, gl.atomic_xchg(extra, 3))
    gl.atomic_min(extra + 1 + (i % 4), i - 10)
    gl.atomic_or(extra + 5, 6)
    gl.atomic_and(extra + 5, 12)


def test_atomics():
    index = np.random.default_rng(2).integers(0, 6, 32, dtype=np.int32)
    counters, old, extra = np.full(6, 100, np.int32), np.zeros(35, np.int32), np.zeros(6, np.int32)
    run(atomics_kernel, [counters, index, old, extra])
    want, seen = np.full(6, 100), []
    for lane in range(30):
        seen.append(want[index[lane]])
        want[index[lane]] += 2
    np.testing.assert_array_equal(counters, want)
    np.testing.assert_array_equal(old[:30], seen)
    assert old[32:].tolist() == [5, 8, 8] and extra.tolist() == [3, -10, -9, -8, -7, 4]


@gluon.jit
def scalar_kernel(x, f, out):
    value = gl.load(x + 1)
    out_f = f + 0
    gl.store(out, value * 2 + gl.load(x))
    gl.store(out + 1, (value > 3) & (gl.load(x) < 3))
    gl.store(out + 2, gl.load(f).to(gl.int32))
    gl.store(out_f + 1, gl.load(f) / 3)
    n = 0
    for i in range(value, 0, -2):
        n += i
    gl.store(out + 3, min(n, 100) + max(3, 4))
    j = 0
    while j * j < n:
        j += 1
    gl.store(out + 4, j if j > 2 else -j)


def test_scalars_and_control_flow():
    x, f, out = np.array([2, 7], np.int32), np.array([2.75, 0], np.float32), np.zeros(5, np.int32)
    run(scalar_kernel, [x, f, out])
    assert out.tolist() == [16, 1, 2, 7 + 5 + 3 + 1 + 4, 4]
    assert f[1] == np.float32(2.75) / np.float32(3)


# --- TMA ------------------------------------------------------------------------------------------


@gluon.jit
def tma_kernel(source, target, r, c, R: gl.constexpr, C: gl.constexpr):
    smem = gl.allocate_shared_memory(source.dtype, [R, C], source.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    cta_barrier()
    mbarrier.expect(bar, R * C * 2)
    tma_load(source, [r, c], bar, smem)
    mbarrier.wait(bar, 0)
    tma_store(target, [r + 1, c + 8], smem)
    tma.store_wait(0)
    mbarrier.invalidate(bar)


@pytest.mark.parametrize(("r", "c"), [(0, 0), (8, 16), (-2, 0), (3, 56), (-8, -16), (12, 40)])
def test_tma_boxes_over_the_edge(r, c):
    rows, columns = 12, 56
    source = np.random.default_rng(4).integers(0, 1000, (rows, 64), dtype=np.int16)
    target = np.full((rows, columns), 5, np.int16)
    m = Machine()
    kinds = {"dtype": "bfloat16", "block_shape": [8, 16]}
    a = m.descriptor(m.register(0, source), shape=[rows, columns], stride=64, **kinds)
    b = m.descriptor(m.register(0, target), shape=[rows, columns], **kinds)
    m.enqueue(0, tma_kernel, grid=1, args=[a, b, r, c], kwargs={"R": 8, "C": 16})
    m.run()
    want = np.full((rows, columns), 5, np.int16)
    for i in range(8):
        for j in range(16):
            x, y = r + i, c + j
            value = source[x, y] if 0 <= x < rows and 0 <= y < columns else 0
            if 0 <= x + 1 < rows and 0 <= y + 8 < columns:
                want[x + 1, y + 8] = value
    np.testing.assert_array_equal(target, want)


def test_descriptor_rules():
    m = Machine()
    buffer = m.register(0, np.zeros(4096, np.uint8))
    good = {"shape": [8, 64], "dtype": "bfloat16", "block_shape": [8, 64]}
    m.descriptor(buffer, 32, **good)
    with pytest.raises(Misaligned, match="multiple of 16"):
        m.descriptor(buffer, 8, **good)
    with pytest.raises(Misaligned, match="strides"):
        m.descriptor(buffer, 0, stride=68, **good)
    with pytest.raises(Misaligned, match="rows"):
        m.descriptor(buffer, 0, **(good | {"block_shape": [8, 4]}))
