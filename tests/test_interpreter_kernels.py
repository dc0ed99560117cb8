"""Whole kernels under the interpreter: right on every schedule, with the same bits.

`exchange` has every kind of hand-over that the mega-kernel has: ordinary stores into a peer's
memory, read there by TMA; a ring of shared memory between a loader and WGMMA; a staging tile
written by TMA and read back with ordinary loads; flow control back to the writer.  `halves` shares
shared memory between two math partitions.  Two ranks, two rounds and a ring shorter than the K loop
make every wait of these protocols happen; 50 schedules are more than the fault tests need to
find each broken variant of them.
"""

import numpy as np
import pytest

from megamoe.interpreter import Machine
from megamoe.interpreter import dtypes as dt
from megamoe.kernel.compat import (
    cta_barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    tma,
    tma_load,
    warpgroup_mma,
    warpgroup_mma_wait,
)

tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global

POLL_SYS = gl.constexpr("""
{
.reg .pred p;
.reg .b32 v;
again:
ld.acquire.sys.global.b32 v, [$1];
setp.lt.s32 p, v, $2;
@p bra again;
mov.b32 $0, v;
}
""")
POLL_GPU = gl.constexpr("""
{
.reg .pred p;
.reg .b32 v;
again:
ld.acquire.gpu.global.b32 v, [$1];
setp.lt.s32 p, v, $2;
@p bra again;
mov.b32 $0, v;
}
""")
PROXY_FENCE = gl.constexpr("fence.proxy.async; mov.b32 $0, $1;")
BM = gl.constexpr(64)
BN = gl.constexpr(64)
BK = gl.constexpr(64)
STAGES = gl.constexpr(2)


@gluon.jit
def every_thread():
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.arange(0, 32 * gl.num_warps(), layout=layout) * 0


@gluon.jit
def poll(flag, wanted, ASM: gl.constexpr):
    """Every thread waits until *flag >= wanted."""
    zero = every_thread()
    gl.inline_asm_elementwise(
        ASM, "=r,l,r", [flag + zero, wanted + zero], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def fence_proxy():
    gl.inline_asm_elementwise(
        PROXY_FENCE, "=r,r", [every_thread()], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def peer_flag(peers, rank, offset):
    return (gl.load(peers + rank) + offset).to(gl.pointer_type(gl.int32), bitcast=True)


@gluon.jit
def produce_role(peers, pool_offset, flags_offset, rank, ranks, rounds, K: gl.constexpr):
    """Fill the next rank's pool, once a round."""
    layout: gl.constexpr = gl.BlockedLayout([1, 16], [4, 8], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, K, layout=gl.SliceLayout(0, layout))
    element = row[:, None] * K + column[None, :]
    target = (rank + 1) % ranks
    pool = (gl.load(peers + target) + pool_offset).to(gl.pointer_type(gl.float8e4nv), bitcast=True)
    taken = peer_flag(peers, rank, flags_offset + 4)
    for t in range(rounds):
        poll(taken, t, POLL_SYS)
        value = ((element * 3 + t * 5 + rank * 7) % 16).to(gl.float32) - 8.0
        gl.store(pool + element, value.to(gl.float8e4nv))
        fence_proxy()
        cta_barrier()
        gl.atomic_add(peer_flag(peers, target, flags_offset), 1, sem="release", scope="sys")


@gluon.jit
def load_role(x_desc, w_desc, x_smem, w_smem, full, empty, arrived, rounds, K: gl.constexpr):
    it = 0
    for t in range(rounds):
        poll(arrived, t + 1, POLL_SYS)
        fence_proxy()
        for k in range(K // BK):
            s = it % STAGES
            mbarrier.wait(empty.index(s), ((it // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(s), (BM + BN) * BK)
            tma_load(x_desc, [0, k * BK], full.index(s), x_smem.index(s))
            tma_load(w_desc, [0, k * BK], full.index(s), w_smem.index(s))
            it += 1


@gluon.jit
def math_role(
    y_desc,
    x_smem,
    w_smem,
    staging,
    full,
    empty,
    peers,
    flags_offset,
    rank,
    ranks,
    rounds,
    K: gl.constexpr,
):
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BN, 32]
    )
    taken = peer_flag(peers, (rank + ranks - 1) % ranks, flags_offset + 4)
    done = peer_flag(peers, rank, flags_offset + 8)
    it = 0
    for t in range(rounds):
        acc = gl.zeros((BM, BN), gl.float32, layout)
        for _ in range(K // BK):
            s = it % STAGES
            mbarrier.wait(full.index(s), (it // STAGES) & 1)
            weights = w_smem.index(s).permute((1, 0))
            acc = warpgroup_mma(x_smem.index(s), weights, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(empty.index(s), count=1)
            it += 1
        cta_barrier()
        gl.atomic_add(taken, 1, sem="release", scope="sys")
        staging.store((acc * 0.5).to(gl.bfloat16))
        fence_async_shared()
        cta_barrier()
        tma_store(y_desc, [t * BM, 0], staging)
        tma.store_wait(0)
        cta_barrier()
        gl.atomic_add(done, 1, sem="release", scope="gpu")


@gluon.jit
def combine_role(y, out, peers, flags_offset, rank, rounds):
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    row = gl.arange(0, BM, layout=gl.SliceLayout(1, layout))
    column = gl.arange(0, BN, layout=gl.SliceLayout(0, layout))
    element = row[:, None] * BN + column[None, :]
    done = peer_flag(peers, rank, flags_offset + 8)
    for t in range(rounds):
        poll(done, t + 1, POLL_GPU)
        tile = t * (BM * BN)
        gl.store(out + tile + element, gl.load(y + tile + element).to(gl.float32) + 1.0)


@gluon.jit
def exchange(
    x_desc,
    w_desc,
    y_desc,
    y,
    out,
    peers,
    pool_offset,
    flags_offset,
    rank,
    ranks,
    rounds,
    K: gl.constexpr,
):
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES, BM, BK], x_desc.layout)
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES, BN, BK], w_desc.layout)
    staging = gl.allocate_shared_memory(y_desc.dtype, [BM, BN], y_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    cta_barrier()
    arrived = peer_flag(peers, rank, flags_offset)
    gl.warp_specialize(
        [
            (
                math_role,
                (
                    y_desc,
                    x_smem,
                    w_smem,
                    staging,
                    full,
                    empty,
                    peers,
                    flags_offset,
                    rank,
                    ranks,
                    rounds,
                    K,
                ),
            ),
            (produce_role, (peers, pool_offset, flags_offset, rank, ranks, rounds, K)),
            (load_role, (x_desc, w_desc, x_smem, w_smem, full, empty, arrived, rounds, K)),
            (combine_role, (y, out, peers, flags_offset, rank, rounds)),
        ],
        [4, 1, 4],
        [80, 40, 80],
    )


def run_exchange(kernel, *, seed, ranks=2, rounds=2, k=256):
    """One launch of `exchange` on each rank; returns every rank's result, and the machine."""
    m = Machine(ranks=ranks, seed=seed, max_steps=200_000)
    bm, bn = 64, 64
    rng = np.random.default_rng(7)
    weights = dt.e4m3_encode(rng.integers(-4, 5, (bn, k)).astype(np.float32))
    pool_offset, flags_offset = 0, bm * k
    outs, arguments, peers = [], [], []
    buffers = []
    for rank in range(ranks):
        symm = m.register(rank, np.zeros(flags_offset + 64, np.uint8), name="symm")
        m.label(symm, pool_offset, bm * k, "pool", 1)
        for i, name in enumerate(("arrived", "taken", "done")):
            m.label(symm, flags_offset + 4 * i, 4, name, 4)
        m.mark_unwritten(symm, pool_offset, bm * k)
        buffers.append(symm)
    for rank in range(ranks):
        y = m.register(rank, np.zeros((rounds * bm, bn), np.uint16), name="y", written=False)
        out = np.zeros((rounds * bm, bn), np.float32)
        outs.append(out)
        peers = m.register(rank, np.array([b.address for b in buffers], np.int64), name="peers")
        w = m.register(rank, weights.copy(), name="w", readonly=True)
        fp8 = {"dtype": "float8e4nv", "block_shape": [64, 64]}
        arguments = [
            m.descriptor(buffers[rank], pool_offset, shape=[bm, k], **fp8),
            m.descriptor(w, shape=[bn, k], **fp8),
            m.descriptor(y, shape=[rounds * bm, bn], dtype="bfloat16", block_shape=[bm, bn]),
            m.pointer(y, "bfloat16"),
            m.pointer(m.register(rank, out, name="out"), "float32"),
            m.pointer(peers, "int64"),
            pool_offset,
            flags_offset,
            rank,
            ranks,
            rounds,
        ]
        m.enqueue(rank, kernel, grid=1, args=arguments, kwargs={"K": k}, num_warps=4)
    m.run()
    return outs, m


def expected_exchange(*, ranks=2, rounds=2, k=256):
    rng = np.random.default_rng(7)
    weights = rng.integers(-4, 5, (64, k)).astype(np.float64)
    element = np.arange(64)[:, None] * k + np.arange(k)
    outs = []
    for rank in range(ranks):
        source = (rank + ranks - 1) % ranks
        tiles = [
            ((element * 3 + t * 5 + source * 7) % 16 - 8.0) @ weights.T * 0.5 for t in range(rounds)
        ]
        y = dt.bf16_round(np.concatenate(tiles).astype(np.float32))
        outs.append(y + np.float32(1))
    return outs


def test_exchange_is_right_on_50_schedules():
    want = expected_exchange()
    orders = set()
    for seed in range(50):
        got, m = run_exchange(exchange, seed=seed)
        for g, w in zip(got, want, strict=True):
            np.testing.assert_array_equal(g, w, err_msg=f"seed {seed}")
        orders.add(m.steps)
    assert len(orders) > 5, "the seeds do not give different schedules"


def test_same_seed_same_run():
    first, m1 = run_exchange(exchange, seed=3)
    second, m2 = run_exchange(exchange, seed=3)
    assert m1.steps == m2.steps
    np.testing.assert_array_equal(first[0], second[0])


@pytest.mark.parametrize("ranks", [1, 3])
def test_exchange_with_other_numbers_of_ranks(ranks):
    got, m = run_exchange(exchange, seed=1, ranks=ranks, rounds=3)
    for g, w in zip(got, expected_exchange(ranks=ranks, rounds=3), strict=True):
        np.testing.assert_array_equal(g, w)
    assert m.launches == [(r, "exchange") for r in range(ranks)]


# --- two partitions that share shared memory ------------------------------------------------------


@gluon.jit
def half_role(source, out, shared, bar, rounds, WHICH: gl.constexpr, N: gl.constexpr):
    """Both halves of a row find the row's maximum together, and divide by it."""
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    row = gl.arange(0, 16, layout=rows)
    column = gl.arange(0, N, layout=gl.SliceLayout(0, layout)) + WHICH * N
    element = row[:, None] * (2 * N) + column[None, :]
    for t in range(rounds):
        x = gl.load(source + t * (32 * N) + element)
        shared.index((t & 1) * 2 + WHICH).store(gl.max(x, 1))
        mbarrier.arrive(bar, count=1)
        mbarrier.wait(bar, t & 1)
        top = gl.maximum(
            shared.index((t & 1) * 2).load(rows), shared.index((t & 1) * 2 + 1).load(rows)
        )
        gl.store(out + t * (32 * N) + element, x / top[:, None])


@gluon.jit
def halves(source, out, rounds, N: gl.constexpr):
    shared = gl.allocate_shared_memory(gl.float32, [4, 16], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=2)
    fence_async_shared()
    cta_barrier()
    gl.warp_specialize(
        [
            (half_role, (source, out, shared, bar, rounds, 0, N)),
            (half_role, (source, out, shared, bar, rounds, 1, N)),
        ],
        [4],
        [64],
    )


def run_halves(kernel, *, seed, rounds=4, n=32):
    m = Machine(seed=seed, max_steps=100_000)
    x = np.random.default_rng(1).uniform(1, 2, (rounds, 16, 2 * n)).astype(np.float32)
    out = np.zeros_like(x)
    args = [m.pointer(m.register(0, a), "float32") for a in (x, out)]
    m.enqueue(0, kernel, grid=1, args=[*args, rounds], kwargs={"N": n})
    m.run()
    return x, out


def test_halves_share_a_maximum():
    for seed in range(20):
        x, out = run_halves(halves, seed=seed)
        np.testing.assert_array_equal(out, x / x.max(axis=2, keepdims=True))


# --- streams --------------------------------------------------------------------------------------


@gluon.jit
def add_to_peer(mine, theirs, amount):
    """One launch of a chain: what the launch before it wrote here needs no flag."""
    value = gl.load(mine)
    gl.store(mine, value + amount)
    gl.atomic_add(theirs, value, sem="relaxed", scope="sys")


def test_launches_of_a_rank_run_in_order_and_ranks_drift():
    drifted = 0
    for seed in range(20):
        m = Machine(ranks=2, seed=seed)
        mine = [np.zeros(1, np.int32) for _ in range(2)]
        sums = [np.zeros(1, np.int32) for _ in range(2)]
        m1 = [m.register(r, a, name="mine") for r, a in enumerate(mine)]
        m2 = [m.register(r, a, name="sums") for r, a in enumerate(sums)]
        for rank in range(2):
            for amount in (1, 10, 100):
                args = [m.pointer(m1[rank], "int32"), m.pointer(m2[1 - rank], "int32"), amount]
                m.enqueue(rank, add_to_peer, grid=1, args=args)
        m.run()
        assert [a[0] for a in mine] == [111, 111]
        assert [a[0] for a in sums] == [0 + 1 + 11] * 2
        assert [n for r, n in m.launches if r == 0] == ["add_to_peer"] * 3
        ranks = [r for r, _ in m.launches]
        drifted += ranks not in ([0, 1] * 3, [0, 1, 1, 0] * 3)
    assert drifted, "no schedule let the ranks drift apart"


def test_memory_keeps_its_state_between_runs():
    m = Machine(ranks=2)
    mine, sums = np.zeros(1, np.int32), np.zeros(1, np.int32)
    a, b = m.register(0, mine), m.register(1, sums)
    for _ in range(3):
        args = [m.pointer(a, "int32"), m.pointer(b, "int32"), 5]
        m.enqueue(0, add_to_peer, grid=1, args=args)
        m.run()
        mine += 1  # the host may write between runs
    assert (mine[0], sums[0]) == (18, 0 + 6 + 12)
