"""Broken kernels under the interpreter: every fault is found, named and placed.

The kernels of `test_interpreter_kernels` are broken one line at a time, so that each wait, signal,
fence and count of their protocols is once missing or wrong; faults that they cannot have (leftover
copies, unwritten or misaligned memory, overflow) have small kernels of their own.  The detector
follows happens-before, so a handful of seeds is enough: a variant must fail on the first three.
The unbroken kernels pass 50 seeds in `test_interpreter_kernels`.
"""

import importlib.util
import re
from pathlib import Path

import numpy as np
import pytest
import test_interpreter_kernels as whole

from megamoe.interpreter import (
    AsyncFault,
    BarrierFault,
    DataRace,
    Deadlock,
    DeviceAssert,
    KernelError,
    Machine,
    Misaligned,
    OutOfBounds,
    Overflow,
    ProxyFault,
    SharedMemoryRace,
    UnsupportedOperation,
    UnwrittenRead,
)
from megamoe.kernel.compat import (
    cta_barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

SOURCE = Path(whole.__file__).read_text()
SEEDS = range(3)


def broken(tmp_path, old, new, name):
    """The module of kernels with one passage of its text replaced."""
    assert SOURCE.count(old) == 1, f"{SOURCE.count(old)} places have {old!r}"
    path = tmp_path / f"broken_{name}.py"
    path.write_text(SOURCE.replace(old, new))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def line_of(text, passage):
    """1-based number of the line of `text` in which `passage` begins."""
    return text[: text.index(passage)].count("\n") + 1


SIGNAL = """\
        fence_proxy()
        cta_barrier()
        gl.atomic_add(peer_flag(peers, target"""

# name: (passage, replacement, exception, role in the message, other words in the message)
EXCHANGE = {
    "no_writer_proxy_fence": (
        SIGNAL,
        "        cta_barrier()\n        gl.atomic_add(peer_flag(peers, target",
        ProxyFault,
        "load_role",
        ["fence.proxy.async", "produce_role"],
    ),
    "no_reader_proxy_fence": (
        "        poll(arrived, t + 1, POLL_SYS)\n        fence_proxy()\n",
        "        poll(arrived, t + 1, POLL_SYS)\n",
        ProxyFault,
        "load_role",
        ["fence.proxy.async", "produce_role"],
    ),
    "proxy_fence_of_shared_memory_only": (
        'PROXY_FENCE = gl.constexpr("fence.proxy.async; ',
        'PROXY_FENCE = gl.constexpr("fence.proxy.async.shared::cta; ',
        ProxyFault,
        "load_role",
        ["fence.proxy.async"],
    ),
    "no_wait_for_arrived": (
        "        poll(arrived, t + 1, POLL_SYS)\n",
        "",
        (UnwrittenRead, DataRace),
        "load_role",
        ["pool["],
    ),
    "no_wait_for_done": (
        "        poll(done, t + 1, POLL_GPU)\n",
        "",
        (UnwrittenRead, DataRace),
        "combine_role",
        ["y+0x0"],
    ),
    "release_of_gpu_scope": (
        'flags_offset), 1, sem="release", scope="sys")',
        'flags_offset), 1, sem="release", scope="gpu")',
        DataRace,
        "load_role",
        ["produce_role", "scope"],
    ),
    "acquire_of_gpu_scope": (
        "poll(arrived, t + 1, POLL_SYS)",
        "poll(arrived, t + 1, POLL_GPU)",
        DataRace,
        "load_role",
        ["scope"],
    ),
    "relaxed_signal": (
        'flags_offset), 1, sem="release", scope="sys")',
        'flags_offset), 1, sem="relaxed", scope="sys")',
        DataRace,
        "load_role",
        ["produce_role"],
    ),
    "relaxed_poll": (
        "ld.acquire.gpu.global.b32",
        "ld.relaxed.gpu.global.b32",
        DataRace,
        "combine_role",
        ["math_role", "y+"],
    ),
    "no_barrier_before_signal": (
        SIGNAL,
        "        fence_proxy()\n        gl.atomic_add(peer_flag(peers, target",
        DataRace,
        "load_role",
        ["produce_role"],
    ),
    "no_wait_for_empty": (
        "            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)\n",
        "",
        (SharedMemoryRace, BarrierFault),
        "load_role",
        ["full[0]"],
    ),
    "no_wait_for_full": (
        "            mbarrier.wait(full.index(s), (it // STAGES) & 1)\n",
        "",
        (SharedMemoryRace, UnwrittenRead),
        "math_role",
        ["x_smem["],
    ),
    "wrong_phase": (
        "mbarrier.wait(full.index(s), (it // STAGES) & 1)",
        "mbarrier.wait(full.index(s), ((it // STAGES) & 1) ^ 1)",
        (SharedMemoryRace, UnwrittenRead),
        "math_role",
        ["x_smem["],
    ),
    "wrong_empty_phase": (
        "mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)",
        "mbarrier.wait(empty.index(s), (it // STAGES) & 1)",
        Deadlock,
        "load_role",
        ["empty[0]", "0 phases are complete"],
    ),
    "release_before_the_product_is_done": (
        "            acc = warpgroup_mma_wait(0, deps=[acc])\n"
        "            mbarrier.arrive(empty.index(s), count=1)\n",
        "            mbarrier.arrive(empty.index(s), count=1)\n"
        "            acc = warpgroup_mma_wait(0, deps=[acc])\n",
        SharedMemoryRace,
        "load_role",
        ["x_smem[", "math_role"],
    ),
    "no_wait_for_the_product": (
        "            acc = warpgroup_mma_wait(0, deps=[acc])\n",
        "",
        (AsyncFault, SharedMemoryRace),
        None,
        ["x_smem[", "WGMMA read"],
    ),
    "too_many_bytes_expected": (
        "(BM + BN) * BK)",
        "(BM + BN) * BK + 16)",
        Deadlock,
        "math_role",
        ["full[0]", "16 bytes are missing"],
    ),
    "too_few_bytes_expected": (
        "(BM + BN) * BK)",
        "BM * BK)",
        BarrierFault,
        "load_role",
        ["full[0]"],
    ),
    "no_arrival_at_empty": (
        "            mbarrier.arrive(empty.index(s), count=1)\n",
        "",
        Deadlock,
        "load_role",
        ["empty[0]", "math_role"],
    ),
    "arrives_twice_at_empty": (
        "mbarrier.arrive(empty.index(s), count=1)",
        "mbarrier.arrive(empty.index(s), count=2)",
        BarrierFault,
        "math_role",
        ["empty[0]", "more arrivals"],
    ),
    "count_of_two": (
        "mbarrier.init(empty.index(i), count=1)",
        "mbarrier.init(empty.index(i), count=2)",
        Deadlock,
        "load_role",
        ["empty[", "1 of 2 arrivals"],
    ),
    "no_shared_fence": (
        "        fence_async_shared()\n        cta_barrier()\n        tma_store(",
        "        tma_store(",
        ProxyFault,
        "math_role",
        ["staging", "fence_async_shared"],
    ),
    "no_store_wait": (
        "        tma.store_wait(0)\n",
        "",
        (DataRace, SharedMemoryRace),
        None,
        ["math_role"],
    ),
    "no_signal": (
        '        gl.atomic_add(done, 1, sem="release", scope="gpu")\n',
        "",
        Deadlock,
        "combine_role",
        ["done[0] of rank", "it is 0; goes on when it is no longer < 1"],
    ),
    "waits_for_too_much": (
        "poll(taken, t, POLL_SYS)",
        "poll(taken, t + 1, POLL_SYS)",
        Deadlock,
        "produce_role",
        ["taken[0] of rank", "it is 0; goes on when it is no longer < 1", "math_role", "load_role"],
    ),
    "outside_the_pool": (
        "pool + element, value.to(gl.float8e4nv)",
        "pool + 65536 + element, value.to(gl.float8e4nv)",
        OutOfBounds,
        "produce_role",
        ["are in no registered buffer"],
    ),
    "flag_address_off_by_two": (
        "(gl.load(peers + rank) + offset)",
        "(gl.load(peers + rank) + offset + 2)",
        Misaligned,
        None,
        [],
    ),
    "coordinate_not_16_bytes": (
        "tma_load(x_desc, [0, k * BK]",
        "tma_load(x_desc, [0, k * BK + 8]",
        Misaligned,
        "load_role",
        ["16 bytes"],
    ),
    "overflowing_index": (
        "(element * 3 + t * 5 + rank * 7)",
        "(element * 300000 + t * 5 + rank * 7)",
        Overflow,
        "produce_role",
        ["int32"],
    ),
    "wrong_ring_index": (
        "            s = it % STAGES\n            mbarrier.wait(empty",
        "            s = it % (STAGES + 1)\n            mbarrier.wait(empty",
        OutOfBounds,
        "load_role",
        ["empty"],
    ),
}


@pytest.mark.parametrize("name", EXCHANGE)
def test_broken_exchange(name, tmp_path):
    old, new, kind, role, words = EXCHANGE[name]
    module = broken(tmp_path, old, new, name)
    for seed in SEEDS:
        with pytest.raises(kind) as caught:
            module.run_exchange(module.exchange, seed=seed)
        text = str(caught.value)
        assert re.search(r"rank [01], program 0, \w+_role", text), text
        if kind is not Deadlock:
            assert text.startswith(f"broken_{name}.py:"), text
        if role is not None:
            assert role in text, text
        for word in words:
            assert word in text, text


def test_writer_that_does_not_wait_for_its_readers(tmp_path):
    """The one variant that is no race on some schedules: both rounds may be written first.

    Then the numbers are wrong instead.  The race's message has the lines of both parties.
    """
    module = broken(tmp_path, "        poll(taken, t, POLL_SYS)\n", "", "taken")
    text = Path(module.__file__).read_text()
    writer = rf"broken_taken.py:{line_of(text, 'gl.store(pool + element')}"
    reader = rf"broken_taken.py:{line_of(text, 'tma_load(x_desc')}"
    races = set()
    for seed in range(8):
        try:
            got, _ = module.run_exchange(module.exchange, seed=seed)
        except DataRace as e:
            races.add("writes" if e.args[0].startswith(writer) else "reads")
            assert re.match(
                f"({writer}|{reader}): rank [01], program 0, (produce|load)_role: ", str(e)
            )
            assert re.search(f"(produce|load)_role at ({writer}|{reader})", str(e))
            assert "pool[" in str(e)
        else:
            assert any((g != w).any() for g, w in zip(got, whole.expected_exchange(), strict=True))
    assert races, "no schedule showed the race"


HALVES = {
    "single_buffer": (
        [("(t & 1) * 2 + WHICH", "WHICH")],
        SharedMemoryRace,
        ["shared[", "half_role#"],
    ),
    "no_wait": (
        [("        mbarrier.wait(bar, t & 1)\n", "")],
        (SharedMemoryRace, UnwrittenRead),
        ["shared["],
    ),
    "one_arrival_missing": (
        [("mbarrier.init(bar, count=2)", "mbarrier.init(bar, count=3)")],
        Deadlock,
        ["bar", "1 of 3 arrivals"],
    ),
    "no_init": (
        [("    mbarrier.init(bar, count=2)\n", "")],
        BarrierFault,
        ["bar", "before mbarrier.init"],
    ),
    "init_twice": (
        [("    mbarrier.init(bar, count=2)\n", "    mbarrier.init(bar, count=2)\n" * 2)],
        BarrierFault,
        ["bar", "twice"],
    ),
}


@pytest.mark.parametrize("name", HALVES)
def test_broken_halves(name, tmp_path):
    changes, kind, words = HALVES[name]
    for old, new in changes:
        module = broken(tmp_path, old, new, f"halves_{name}")
    for seed in SEEDS:
        with pytest.raises(kind) as caught:
            module.run_halves(module.halves, seed=seed)
        for word in words:
            assert word in str(caught.value), caught.value


# --- small kernels --------------------------------------------------------------------------------


def run_one(kernel, arrays=(), *extra, seed=0, grid=1, machine=None, written=True, **constants):
    """Run a kernel whose first arguments are int32 pointers to `arrays`."""
    m = machine or Machine(seed=seed, max_steps=50_000)
    pointers = [
        m.pointer(m.register(0, a, name=f"array{i}", written=written), "int32")
        for i, a in enumerate(arrays)
    ]
    m.enqueue(0, kernel, grid=grid, args=[*pointers, *extra], kwargs=constants)
    m.run()
    return m


def tile_descriptor(m, rows=64):
    data = m.register(0, np.zeros((rows, 64), np.uint8), name="tile")
    return m.descriptor(data, shape=[rows, 64], dtype="float8e4nv", block_shape=[64, 64])


@gluon.jit
def leaves_a_copy(desc, WAIT: gl.constexpr, BYTES: gl.constexpr):
    smem = gl.allocate_shared_memory(gl.float8e4nv, [64, 64], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, BYTES)
    tma_load(desc, [0, 0], bar, smem)
    if WAIT:
        mbarrier.wait(bar, 0)


def test_copy_left_at_the_end():
    for seed in SEEDS:
        m = Machine(seed=seed)
        m.enqueue(
            0, leaves_a_copy, grid=1, args=[tile_descriptor(m)], kwargs=dict(WAIT=1, BYTES=4096)
        )
        m.run()
        m = Machine(seed=seed)
        m.enqueue(
            0, leaves_a_copy, grid=1, args=[tile_descriptor(m)], kwargs=dict(WAIT=0, BYTES=4096)
        )
        with pytest.raises(AsyncFault, match="TMA loads under way"):
            m.run()


@gluon.jit
def expects_without_a_copy(BYTES: gl.constexpr):
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, BYTES)


def test_bytes_pending_at_the_end():
    with pytest.raises(BarrierFault, match="bar still expects 64 bytes"):
        run_one(expects_without_a_copy, BYTES=64)


@gluon.jit
def uses_products(desc, out, HOW: gl.constexpr):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 32]
    )
    smem = gl.allocate_shared_memory(gl.float8e4nv, [64, 64], desc.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    fence_async_shared()
    cta_barrier()
    mbarrier.expect(bar, 64 * 64)
    tma_load(desc, [0, 0], bar, smem)
    mbarrier.wait(bar, 0)
    acc = gl.zeros((64, 64), gl.float32, layout)
    acc = warpgroup_mma(smem, smem.permute((1, 0)), acc, is_async=True)
    if HOW == "add":
        acc = acc + 1.0
    if HOW == "convert":
        acc = acc.to(gl.bfloat16)
    if HOW == "store":
        gl.store(out + gl.arange(0, 64, layout=gl.SliceLayout(0, layout))[None, :], acc)
    if HOW == "overwrite":
        smem.store(gl.zeros((64, 64), gl.float8e4nv, layout))
    if HOW != "leave":
        acc = warpgroup_mma_wait(0, deps=[acc])


@pytest.mark.parametrize(
    ("how", "kind"),
    [
        ("add", AsyncFault),
        ("convert", AsyncFault),
        ("store", AsyncFault),
        ("leave", AsyncFault),
        ("overwrite", SharedMemoryRace),
    ],
)
def test_product_before_its_wait(how, kind):
    m = Machine()
    out = m.pointer(m.register(0, np.zeros(64, np.float32)), "float32")
    m.enqueue(0, uses_products, grid=1, args=[tile_descriptor(m), out], kwargs={"HOW": how})
    with pytest.raises(kind, match=r"test_interpreter_faults.py:\d+: rank 0, program 0"):
        m.run()


def test_product_after_its_wait_is_no_fault():
    m = Machine()
    out = m.pointer(m.register(0, np.zeros(64, np.float32)), "float32")
    m.enqueue(0, uses_products, grid=1, args=[tile_descriptor(m), out], kwargs={"HOW": "wait"})
    m.run()


@gluon.jit
def copies(source, target, N: gl.constexpr, OFFSET: gl.constexpr):
    i = gl.arange(0, N)
    gl.store(target + i, gl.load(source + OFFSET + i))


def test_unwritten_global_memory():
    a, b = np.zeros(64, np.int32), np.zeros(64, np.int32)
    m = Machine()
    source, target = m.register(0, a, name="a", written=False), m.register(0, b, name="b")
    m.label(source, 128, 128, "upper", 4)
    args = [m.pointer(source, "int32"), m.pointer(target, "int32")]
    m.mark_written(source, 0, 80)
    m.enqueue(0, copies, grid=1, args=args, kwargs={"N": 16, "OFFSET": 0})
    m.run()
    m.enqueue(0, copies, grid=1, args=args, kwargs={"N": 16, "OFFSET": 16})
    with pytest.raises(UnwrittenRead, match=r"a\+0x50 of rank 0"):
        m.run()
    m.mark_written(source, 80, 64)
    m.enqueue(0, copies, grid=1, args=args, kwargs={"N": 16, "OFFSET": 32})
    with pytest.raises(UnwrittenRead, match=r"upper\[4\] of rank 0"):
        m.run()
    m.enqueue(0, copies, grid=1, args=[args[1], args[0]], kwargs={"N": 64, "OFFSET": 0})
    m.enqueue(0, copies, grid=1, args=args, kwargs={"N": 16, "OFFSET": 32})
    m.run()  # the kernel itself has written it
    m.mark_unwritten(source, 0, 4)
    m.enqueue(0, copies, grid=1, args=args, kwargs={"N": 1, "OFFSET": 0})
    with pytest.raises(UnwrittenRead):
        m.run()


def test_out_of_bounds_and_read_only():
    a, b = np.zeros(64, np.int32), np.zeros(64, np.int32)
    with pytest.raises(OutOfBounds, match="array0 of rank 0, 256 bytes, this is byte 4"):
        run_one(copies, [a, b], N=64, OFFSET=1)
    m = Machine()
    source, target = m.register(0, a), m.register(0, b, name="fixed", readonly=True)
    args = [m.pointer(source, "int32"), m.pointer(target, "int32")]
    m.enqueue(0, copies, grid=1, args=args, kwargs={"N": 64, "OFFSET": 0})
    with pytest.raises(KernelError, match="fixed.* read-only"):
        m.run()


@gluon.jit
def masked_copy(source, target, limit, N: gl.constexpr):
    i = gl.arange(0, N)
    gl.store(target + i, gl.load(source + i, mask=i < limit, other=-1), mask=i < limit + 2)


def test_masked_lanes_touch_nothing():
    a, b = np.arange(10, dtype=np.int32), np.zeros(12, np.int32)
    run_one(masked_copy, [a, b], 10, N=64)
    np.testing.assert_array_equal(b, [*range(10), -1, -1])
    with pytest.raises(OutOfBounds):
        run_one(masked_copy, [a, b], 11, N=64)


@gluon.jit
def asserts(x, WHAT: gl.constexpr):
    if WHAT == "device":
        gl.device_assert(gl.load(x) == 1, "x is not one")
    if WHAT == "static":
        gl.static_assert(WHAT == "no", "never")
    if WHAT == "unknown":
        gl.load(x).cumulative_product()
    if WHAT == "ptx":
        gl.inline_asm_elementwise(
            "vabsdiff4.u32 $0, $1, $1;",
            "=r,r",
            [gl.arange(0, 32)],
            dtype=gl.int32,
            is_pure=True,
            pack=1,
        )


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("device", DeviceAssert, "x is not one"),
        ("static", DeviceAssert, "never"),
        ("unknown", KernelError, "cumulative_product"),
        ("ptx", UnsupportedOperation, "vabsdiff4.u32"),
    ],
)
def test_asserts_and_unknown_operations(what, kind, words):
    with pytest.raises(kind, match=words) as caught:
        run_one(asserts, [np.zeros(1, np.int32)], WHAT=what)
    assert str(caught.value).startswith("test_interpreter_faults.py:")
