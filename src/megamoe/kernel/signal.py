"""One warp that tells the readers of a tile when all math partitions have stored it, so that the
math goes on.
"""

from megamoe.kernel.compat import gl, gluon, mbarrier
from megamoe.kernel.context import TASK_SLOTS
from megamoe.kernel.schedule import DONE, LINEAR1, LINEAR2, release_task, take_task
from megamoe.kernel.sync import arrive_last, signal_peers, signal_tile
from megamoe.kernel.trace import SIGNAL, now, record


@gluon.jit
def origin_of(spec: gl.constexpr, origin, real):
    """(source rank, token * topk + slot, whether to use it) of pool rows; the pair is (0, 0) where
    it is not used.

    After an abort an origin may be stale: whatever it holds, an address made of it stays inside a
    buffer.
    """
    source = (origin >> 32).to(gl.int32)
    entry = origin.to(gl.int32)
    real = (
        real
        & (source >= 0)
        & (source < spec.ranks)
        & (entry >= 0)
        & (entry < spec.capacity * spec.topk)
    )
    return gl.where(real, source, 0), gl.where(real, entry, 0), real


@gluon.jit
def signal_partials(ctx, l2_done, block, valid):
    """One more L2 tile of the block is stored; after the last, each of its rows' tokens has one
    more partial.
    """
    spec: gl.constexpr = ctx.spec
    scope: gl.constexpr = spec.scope
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    row = gl.arange(0, spec.signal_lanes, layout=lanes)
    real = row < valid
    slot = (block % spec.ring_blocks) * spec.block_m
    # read before arriving: then the slot belongs to dispatch again
    origin = gl.load(
        ctx.region(spec.offset.pool_origin, gl.int64) + slot + row,
        mask=real,
        other=0,
        cache_modifier=".cg",
    )
    source, entry, real = origin_of(spec, origin, real)
    if arrive_last(l2_done + block, spec.l2_tiles - 1, scope):
        arrivals = ctx.peer_region(source, spec.offset.token_arrivals, gl.int32)
        arrivals += ctx.counter_set * (spec.offset.token_set // 4) + entry // spec.topk
        signal_peers(arrivals, real)


@gluon.jit
def signal_role(ctx, rings):
    spec: gl.constexpr = ctx.spec
    l1_done = ctx.block_counters(spec.offset.l1_done)
    l2_done = ctx.block_counters(spec.offset.l2_done)
    i = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        mbarrier.wait(rings.tile_done.index(i % TASK_SLOTS), (i // TASK_SLOTS) & 1)
        begin = now(ctx)
        if kind == LINEAR1:
            signal_tile(l1_done + block)
        elif kind == LINEAR2:
            signal_partials(ctx, l2_done, block, valid)
        record(ctx, SIGNAL, i, kind, block, tile, begin, begin, now(ctx))
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
