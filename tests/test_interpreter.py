"""Number formats, arithmetic, shapes, reductions and name binding of the interpreter.

Against NumPy and torch.  Number formats are tried on every code, on random bit patterns and on
ties; arithmetic on random operands; overflow on every operation that can and cannot have it.
"""

import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
import test_interpreter_kernels as whole
import torch

from megamoe.interpreter import KernelError, Machine, Overflow
from megamoe.interpreter import dtypes as dt
from megamoe.kernel.compat import (
    aggregate,
    gl,
    gluon,
    tma,
)

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
NAMES = {
    np.dtype(np.int32): "int32",
    np.dtype(np.float32): "float32",
    np.dtype(np.int64): "int64",
    np.dtype(np.int8): "int8",
    np.dtype(np.uint8): "uint8",
}


def run(kernel, arrays, *extra, grid=1, seed=0, num_warps=4, **constants):
    """Run a kernel on pointers to arrays (or (array, dtype name) pairs) and plain arguments."""
    m = Machine(seed=seed)
    pointers = []
    for i, a in enumerate(arrays):
        a, name = a if isinstance(a, tuple) else (a, NAMES[a.dtype])
        pointers.append(m.pointer(m.register(0, a, name=f"array{i}"), name))
    m.enqueue(0, kernel, grid=grid, args=[*pointers, *extra], kwargs=constants, num_warps=num_warps)
    m.run()
    return m


# --- number formats -------------------------------------------------------------------------------


def patterns():
    """Random fp32 bit patterns, all magnitudes near e4m3 and bf16, and the special ones."""
    rng = np.random.default_rng(0)
    some = rng.integers(0, 1 << 32, 100_000, dtype=np.uint64).astype(np.uint32).view(np.float32)
    near = (rng.standard_normal(100_000) * 2.0 ** rng.integers(-12, 10, 100_000)).astype(np.float32)
    ties = (np.arange(1, 2049) * 2.0**-11).astype(np.float32)
    special = np.array(
        [0, -0.0, 448, 464, 465, np.inf, -np.inf, np.nan, 2**-10, 3 * 2**-10], np.float32
    )
    return np.concatenate([some, near, ties, -ties, special])


def test_e4m3_codes():
    x = patterns()
    want = torch.from_numpy(x).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    want = np.where(np.isnan(x), 127, want)
    np.testing.assert_array_equal(dt.e4m3_encode(x), want)
    codes = torch.arange(256, dtype=torch.uint8)
    np.testing.assert_array_equal(dt.E4M3_32, codes.view(torch.float8_e4m3fn).float().numpy())


def test_bf16_rounding():
    x = patterns()
    want = torch.from_numpy(x).bfloat16()
    np.testing.assert_array_equal(dt.bf16_round(x), want.float().numpy())
    finite = ~np.isnan(x)
    np.testing.assert_array_equal(
        dt.encode(dt.bf16_round(x), dt.bfloat16)[finite],
        want.view(torch.int16).numpy().view(np.uint16)[finite],
    )


@gluon.jit
def convert_kernel(source, target, N: gl.constexpr, BITS: gl.constexpr):
    i = gl.arange(0, N)
    x = gl.load(source + i)
    gl.store(target + i, x.to(target.dtype.element_ty, bitcast=BITS))


@pytest.mark.parametrize(
    ("source", "target", "bits"),
    [
        ("float32", "float8e4nv", False),
        ("float8e4nv", "float32", False),
        ("float32", "bfloat16", False),
        ("bfloat16", "float32", False),
        ("float32", "float16", False),
        ("float32", "int32", False),
        ("int32", "float32", False),
        ("int32", "int8", False),
        ("int32", "int64", False),
        ("int32", "float32", True),
        ("float32", "int32", True),
        ("int8", "float8e4nv", True),
        ("uint8", "int32", False),
        ("int8", "int32", False),
    ],
)
def test_conversions(source, target, bits):
    torch_types = {"float8e4nv": torch.float8_e4m3fn}
    src, dst = (torch_types.get(n) or getattr(torch, n) for n in (source, target))
    raw = torch.randint(-(1 << 31), 1 << 31, (256,), generator=torch.Generator().manual_seed(3))
    if src.is_floating_point:
        x = (raw.float() * 1e-7).to(src)
    else:
        x = raw.to(src)
    want = x.view(dst) if bits else (x.clamp(-448, 448) if target == "float8e4nv" else x).to(dst)
    out = torch.zeros(256, dtype=dst)
    bytes_of = lambda t: t.view(torch.uint8).numpy()  # noqa: E731
    run(convert_kernel, [(bytes_of(x), source), (bytes_of(out), target)], N=256, BITS=bits)
    np.testing.assert_array_equal(bytes_of(out), bytes_of(want))


# --- arithmetic -----------------------------------------------------------------------------------


@gluon.jit
def arithmetic_kernel(a, b, f, ints, floats, n):
    i = gl.arange(0, 64)
    x = gl.load(a + i)
    y = gl.load(b + i)
    z = gl.load(f + i)
    gl.store(ints + i, x + y)
    gl.store(ints + 64 + i, x - y * 3)
    gl.store(ints + 128 + i, (x & 0xFF) // (y + 1) + (x & 0xFF) % (y + 1))
    gl.store(ints + 192 + i, (x << 7) ^ (x >> 3) | y)
    gl.store(ints + 256 + i, gl.where(x < y, x, -y))
    gl.store(ints + 320 + i, gl.maximum(x, y) - gl.minimum(x, 5) + n // 3 + n % 7)
    gl.store(ints + 384 + i, (x >= 0).to(gl.int32) + (z == z).to(gl.int32) + (~x))
    gl.store(floats + i, x / y)
    gl.store(floats + 64 + i, z * 0.1 + x)
    gl.store(floats + 128 + i, gl.exp(-gl.abs(z)) + gl.sqrt(gl.abs(z)) + gl.exp2(z * 0.5))
    gl.store(floats + 192 + i, gl.fma(z, z, 1.0) - gl.floor(z) + gl.log2(gl.abs(z) + 1.0))
    bf = z.to(gl.bfloat16)
    gl.store(floats + 256 + i, (bf * bf + bf).to(gl.float32))
    gl.store(floats + 320 + i, gl.rsqrt(gl.abs(z) + 1.0) + gl.cdiv(n, 4) * 1.0)


def test_arithmetic():
    rng = np.random.default_rng(1)
    x, y = rng.integers(-1000, 1000, 64, dtype=np.int32), rng.integers(1, 50, 64, dtype=np.int32)
    z = rng.standard_normal(64).astype(np.float32)
    ints, floats = np.zeros(448, np.int32), np.zeros(384, np.float32)
    run(arithmetic_kernel, [x, y, z, ints, floats], 23)
    got = ints.reshape(7, 64)
    want = [
        x + y,
        x - y * 3,
        (x & 255) // (y + 1) + (x & 255) % (y + 1),
        (x << 7) ^ (x >> 3) | y,
        np.where(x < y, x, -y),
        np.maximum(x, y) - np.minimum(x, 5) + 23 // 3 + 23 % 7,
        (x >= 0).astype(int) + 1 + ~x,
    ]
    np.testing.assert_array_equal(got, want)
    got = floats.reshape(6, 64)
    np.testing.assert_array_equal(got[0], x.astype(np.float32) / y.astype(np.float32))
    np.testing.assert_array_equal(got[1], z * np.float32(0.1) + x.astype(np.float32))
    a = np.abs(z)
    np.testing.assert_allclose(got[2], np.exp(-a) + np.sqrt(a) + np.exp2(z / 2), rtol=1e-6)
    np.testing.assert_allclose(got[3], z * z + 1 - np.floor(z) + np.log2(a + 1), rtol=1e-5)
    bf = torch.from_numpy(z).bfloat16()
    np.testing.assert_array_equal(got[4], (bf * bf + bf).float().numpy())
    np.testing.assert_allclose(got[5], 1 / np.sqrt(a + 1) + 6, rtol=1e-6)


@gluon.jit
def overflow_kernel(a, n, HOW: gl.constexpr):
    i = gl.arange(0, 64)
    x = gl.load(a + i)
    if HOW == "lanes":
        x = x + x
    if HOW == "product":
        x = x * (i + 1)
    if HOW == "lazy":
        x = (x[:, None] + i[None, :]) * 2
    if HOW == "scalar":
        x = x * 0 + n * n
    if HOW == "long":
        x = x.to(gl.int64) * 0 + n.to(gl.int64) * n
    if HOW == "shift":
        x = x << 4
    if HOW == "unsigned":
        x = x.to(gl.uint32) + x.to(gl.uint32)
    if HOW == "negative":
        x = (x - x - 7) // 2
    if HOW == "sum":
        gl.sum(x, 0)
    if HOW == "constant":
        x = x + 0x80000000
    if HOW == "masked":
        gl.sum(gl.where(i < 1, x, 0), 0)


@pytest.mark.parametrize(
    ("how", "faulty"),
    [
        ("lanes", True),
        ("product", True),
        ("lazy", True),
        ("scalar", True),
        ("long", False),
        ("shift", False),
        ("unsigned", False),
        ("negative", True),
        ("sum", True),
        ("masked", False),
    ],
)
def test_overflow_is_an_error(how, faulty):
    x = np.full(64, 1 << 30, np.int32)
    if faulty:
        with pytest.raises(
            Overflow, match=r"test_interpreter.py:\d+: rank 0, program 0, overflow_kernel"
        ):
            run(overflow_kernel, [x], 1 << 20, HOW=how)
    else:
        run(overflow_kernel, [x], 1 << 20, HOW=how)


@gluon.jit
def shapes_kernel(source, target):
    i = gl.arange(0, 16)
    j = gl.arange(0, 8)
    x = gl.load(source + i[:, None] * 8 + j[None, :])
    a, b = x.reshape((16, 2, 4)).permute((0, 2, 1)).split()
    gl.store(target + i[:, None] * 4 + gl.arange(0, 4)[None, :], a * 10 + b)
    both = gl.join(a, b).permute((2, 0, 1)).reshape((2, 64))
    gl.store(target + 64 + gl.arange(0, 2)[:, None] * 64 + gl.arange(0, 64)[None, :], both)
    gl.store(target + 192 + gl.arange(0, 64), gl.reshape(gl.expand_dims(a, 0), 64))


def test_shapes():
    x = np.arange(128, dtype=np.int32).reshape(16, 8)
    out = np.zeros(256, np.int32)
    run(shapes_kernel, [x, out])
    halves = x.reshape(16, 2, 4)
    a, b = halves[:, 0], halves[:, 1]
    np.testing.assert_array_equal(out[:64], (a * 10 + b).ravel())
    np.testing.assert_array_equal(out[64:192], np.stack([a, b]).ravel())
    np.testing.assert_array_equal(out[192:], a.ravel())


@gluon.jit
def larger(a, b):
    return gl.maximum(a, b)


@gluon.jit
def first_of(value_a, key_a, value_b, key_b):
    """The value with the smaller key."""
    left = key_a <= key_b
    return gl.where(left, value_a, value_b), gl.where(left, key_a, key_b)


@gluon.jit
def plus(a, b):
    return a + b


@gluon.jit
def reductions_kernel(source, out):
    i = gl.arange(0, 8)
    j = gl.arange(0, 16)
    x = gl.load(source + i[:, None] * 16 + j[None, :])
    gl.store(out + i, gl.sum(x, 1))
    gl.store(out + 8 + j, gl.max(x, axis=0))
    gl.store(out + 24 + i, gl.min(x, 1))
    gl.store(out + 32 + i, gl.reduce(x, 1, larger))
    value, key = gl.reduce((x, gl.abs(x)), 1, first_of)
    gl.store(out + 40 + i, value)
    gl.store(out + 48, gl.sum(gl.sum((x > 0).to(gl.int32), 1), 0))
    gl.store(out + 64 + i[:, None] * 16 + j[None, :], gl.associative_scan(x, 1, plus))
    gl.store(out + 192 + i[:, None] * 16 + j[None, :], gl.associative_scan(x, 0, larger))
    gl.store(
        out + 320 + i[:, None] * 16 + j[None, :], gl.associative_scan(x, 1, plus, reverse=True)
    )
    row = gl.load(source + gl.arange(0, 128)) & 15
    gl.store(out + 448 + j, gl.histogram(row, 16))
    gl.store(out + 464 + gl.arange(0, 128), gl.gather(gl.load(source + j), row, 0))
    gl.store(out + 600, gl.xor_sum(row, 0))


def test_reductions_and_scans():
    x = np.random.default_rng(5).integers(-50, 50, (8, 16), dtype=np.int32)
    out = np.zeros(601, np.int32)
    run(reductions_kernel, [x, out])
    np.testing.assert_array_equal(out[:8], x.sum(1))
    np.testing.assert_array_equal(out[8:24], x.max(0))
    np.testing.assert_array_equal(out[24:32], x.min(1))
    np.testing.assert_array_equal(out[32:40], x.max(1))
    np.testing.assert_array_equal(np.abs(out[40:48]), np.abs(x).min(1))
    assert out[48] == (x > 0).sum()
    np.testing.assert_array_equal(out[64:192].reshape(8, 16), x.cumsum(1))
    np.testing.assert_array_equal(out[192:320].reshape(8, 16), np.maximum.accumulate(x, 0))
    np.testing.assert_array_equal(out[320:448].reshape(8, 16), x[:, ::-1].cumsum(1)[:, ::-1])
    row = x.ravel() & 15
    np.testing.assert_array_equal(out[448:464], np.bincount(row, minlength=16))
    np.testing.assert_array_equal(out[464:592], x[0][row])
    assert out[600] == np.bitwise_xor.reduce(row)


# --- binding --------------------------------------------------------------------------------------

FACTOR = gl.constexpr(3)


@gluon.constexpr_function
def doubled(x):
    return 2 * x


@aggregate
class Walker:
    pointer: gl.tensor
    step: gl.constexpr

    @gluon.constexpr_function
    def __init__(self, pointer, step):
        self.pointer = pointer
        self.step = gl.constexpr(step)

    @gluon.jit
    def read(self, i):
        return gl.load(self.pointer + i * self.step)

    @gluon.jit
    def moved(self, by):
        return Walker(self.pointer + by, self.step)


@gluon.jit
def fallback(x, scale=FACTOR):
    return x * scale


@gluon.jit
def binding_kernel(x, out, N: gl.constexpr, KIND: gl.constexpr):
    walker = Walker(x, doubled(N))
    total = fallback(walker.read(1)) + walker.moved(1).read(0)
    for i in gl.static_range(3):
        total += i * FACTOR
    value = gl.full([], total, gl.int32).to(KIND)
    gl.store(out, value)
    gl.store(out + 1, whole_sum(x) * 1.0)


@gluon.jit
def whole_sum(x):
    return gl.sum(gl.load(x + gl.arange(0, 8)), 0)


def test_names_of_a_kernel_are_bound():
    x, out = np.arange(10, 18, dtype=np.int32), np.zeros(2, np.float32)
    run(binding_kernel, [x, out], N=2, KIND=gl.float32)
    assert out.tolist() == [14 * 3 + 11 + 9, x.sum()]


@gluon.jit
def partitions_kernel(out):
    done = gl.warp_specialize(
        [(count_warps, (out, 0)), (count_warps, (out, 1)), (count_warps, (out, 2))],
        [1, 2],
        [24, 24],
    )
    gl.store(out + 3, done)


@gluon.jit
def count_warps(out, i):
    gl.store(out + i, gl.num_warps() + 10 * gl.program_id(0))
    return i + 40


def test_partitions():
    out = np.zeros(4, np.int32)
    run(partitions_kernel, [out], num_warps=8)
    assert out.tolist() == [8, 1, 2, 40]


def test_arguments_that_are_no_arguments():
    m = Machine()
    a = np.zeros(4, np.int32)
    with pytest.raises(KernelError, match="m.pointer"):
        m.enqueue(0, partitions_kernel, grid=1, args=[a])
    with pytest.raises(KernelError, match="m.pointer"):
        m.enqueue(0, partitions_kernel, grid=1, args=[m.register(0, a)])
    with pytest.raises(TypeError, match="gluon.jit"):
        m.enqueue(0, len, grid=1, args=[])
    with pytest.raises(ValueError, match="rank 1"):
        m.register(1, a)
    with pytest.raises(KernelError, match="contiguous"):
        m.register(0, np.zeros((4, 4))[:, ::2])


@pytest.mark.parametrize("hide", ["1", "import"])
def test_without_triton_the_bits_are_the_same(hide):
    """Also where `import triton` fails, and in Python's own process: no module of it is touched."""
    program = f"""
        import sys
        sys.path[:0] = {sys.path!r}
        if {hide == "import"}:
            sys.modules["triton"] = None
        import test_interpreter_kernels as whole
        from megamoe.kernel import compat
        assert compat.TRITON_VERSION is None
        assert not any(name.startswith("triton") and sys.modules[name] for name in sys.modules)
        outs, m = whole.run_exchange(whole.exchange, seed=2)
        print(m.steps, *[out.tobytes().hex() for out in outs])
    """
    env = os.environ | {"MEGAMOE_HIDE_TRITON": "1" if hide == "1" else "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        env=env,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    outs, m = whole.run_exchange(whole.exchange, seed=2)
    assert done.stdout.split() == [str(m.steps), *[out.tobytes().hex() for out in outs]]
