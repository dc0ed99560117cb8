"""Which tile comes when: a pure function of the rows each local expert receives, walked by one
warp of each CTA.

Pool blocks are numbered expert by expert.  L1 runs `lag` blocks ahead of L2:

    L1(0) .. L1(lag-1)   then for each block s:  L1(lag+s), L2(s)   then L2 of the last lag blocks

where L1(b) and L2(b) stand for all tiles of block b.  L1 tiles go to the programs in turn, and so
do L2 tiles, so that each program has its part of both, which it merges in this order.  Every tile
depends only on tiles before it, so programs that walk their share in order cannot deadlock.  The
schedule warp writes each tile as a task record into a small ring in shared memory; loaders and math
read it from there.
"""

from megamoe.kernel.compat import cta_barrier, gl, gluon, mbarrier
from megamoe.kernel.context import TASK_SLOTS, TASK_WORDS
from megamoe.kernel.sync import PHASE_COUNTS, wait_sys

LINEAR1 = gl.constexpr(0)
LINEAR2 = gl.constexpr(1)
DONE = gl.constexpr(2)
# A stage of zeros through the code of an L1 tile without rows, while the first rows are on their
# way: an instruction comes from memory the first time, which takes longer than all that it does.
REHEARSAL = gl.constexpr(7)


@gluon.jit
def add(a, b):
    return a + b


@gluon.jit
def wait_for_counts(ctx, layout: gl.constexpr):
    """Wait until every rank has published its counts; returns for each rank lane whether it did."""
    spec: gl.constexpr = ctx.spec
    r = gl.arange(0, spec.rank_lanes, layout=layout)
    source = gl.where(r < spec.ranks, r, 0)
    ready = ctx.region(spec.offset.counts_ready, gl.int32)
    seen = wait_sys(
        ready + source,
        source * 0 + ctx.epoch,
        ctx.status() + source * 0,
        PHASE_COUNTS,
        source,
        spec.timeout_ns,
    )
    # each thread has acquired its own lane's flag only
    cta_barrier()
    return gl.min(((seen.to(gl.int64) - ctx.epoch).to(gl.int32) >= 0).to(gl.int32), 0)


@gluon.jit
def rows_of_experts(ctx, layout: gl.constexpr):
    """Rows each local expert receives in this call: int32 [expert_lanes]; zero where a rank never
    arrived.
    """
    spec: gl.constexpr = ctx.spec
    RANKS: gl.constexpr = spec.ranks
    arrived = wait_for_counts(ctx, layout)
    e = gl.arange(0, spec.expert_lanes, layout=layout)
    counts = recv_counts(ctx)
    rows = e * 0
    for source in gl.static_range(RANKS):
        rows += gl.load(
            counts + source * spec.experts_per_rank + e,
            mask=e < spec.experts_per_rank,
            other=0,
            cache_modifier=".cg",
        )
    return rows * arrived


@gluon.jit
def recv_counts(ctx):
    """Pointer to this call's counts: int32 [ranks, experts_per_rank], written by every rank."""
    spec: gl.constexpr = ctx.spec
    counts = ctx.region(spec.offset.recv_counts, gl.int32)
    return counts + ctx.counter_set * (spec.ranks * spec.experts_per_rank)


@gluon.jit
def first_blocks(rows, BLOCK_M: gl.constexpr):
    """First pool block of each expert, and the number of blocks in all."""
    blocks = (rows + (BLOCK_M - 1)) // BLOCK_M
    ends = gl.associative_scan(blocks, 0, add)
    return ends - blocks, gl.sum(blocks, 0)


@gluon.jit
def block_owner(
    block, rows, first, BLOCK_M: gl.constexpr, layout: gl.constexpr, LANES: gl.constexpr
):
    """The local expert that owns a pool block, and how many rows of the block are real."""
    e = gl.arange(0, LANES, layout=layout)
    inside = (block >= first) & ((block - first) * BLOCK_M < rows)
    expert = gl.sum(gl.where(inside, e, 0), 0)
    valid = gl.sum(gl.where(inside, gl.minimum(rows - (block - first) * BLOCK_M, BLOCK_M), 0), 0)
    return expert, valid


@gluon.jit
def place_of_l1(tile, lag, spec: gl.constexpr):
    """Where an L1 tile stands in the order of all tiles."""
    c1: gl.constexpr = spec.l1_tiles
    c2: gl.constexpr = spec.l2_tiles
    block = tile // c1
    return tile + gl.maximum(block - lag, 0) * c2


@gluon.jit
def place_of_l2(tile, lag, blocks, spec: gl.constexpr):
    """Where an L2 tile stands in the order of all tiles."""
    c1: gl.constexpr = spec.l1_tiles
    c2: gl.constexpr = spec.l2_tiles
    return tile + gl.minimum(tile // c2 + 1 + lag, blocks) * c1


@gluon.jit
def schedule_role(ctx, rings):
    """One warp: wait for the counts, then write this program's tasks one after another, and DONE
    at the end.
    """
    spec: gl.constexpr = ctx.spec
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    i = 0
    if spec.rehearses:
        put_task(rings, i, REHEARSAL, 0, 0, 0, 0)
        i = 1
    rows = rows_of_experts(ctx, layout)
    first, blocks = first_blocks(rows, spec.block_m)
    programs = gl.num_programs(0)
    l1_end = blocks * spec.l1_tiles
    l2_end = blocks * spec.l2_tiles
    if (spec.phases != "fused") & (spec.phases != "linear1"):
        l1_end = 0
    if (spec.phases != "fused") & (spec.phases != "linear2"):
        l2_end = 0
    lag = gl.minimum(blocks, spec.lag)
    l1 = gl.program_id(0)
    # the programs after the last with an L1 tile have the first L2 tiles: none has one more of both
    l2 = (gl.program_id(0) + programs - l1_end % programs) % programs
    while (l1 < l1_end) | (l2 < l2_end):
        is_l1 = (l1 < l1_end) & (
            (l2 >= l2_end) | (place_of_l1(l1, lag, spec) < place_of_l2(l2, lag, blocks, spec))
        )
        t = gl.where(is_l1, l1, l2)
        tiles = gl.where(is_l1, spec.l1_tiles, spec.l2_tiles)
        kind = gl.where(is_l1, LINEAR1, LINEAR2)
        block = t // tiles
        expert, valid = block_owner(block, rows, first, spec.block_m, layout, spec.expert_lanes)
        put_task(rings, i, kind, block, t % tiles, expert, valid)
        l1 += gl.where(is_l1, programs, 0)
        l2 += gl.where(is_l1, 0, programs)
        i += 1
    put_task(rings, i, DONE, 0, 0, 0, 0)


@gluon.jit
def put_task(rings, i, kind, block, tile, expert, valid):
    slot = i % TASK_SLOTS
    mbarrier.wait(rings.task_empty.index(slot), ((i // TASK_SLOTS) & 1) ^ 1)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    word = gl.arange(0, TASK_WORDS, layout=layout)
    record = gl.where(
        word == 0,
        kind,
        gl.where(
            word == 1,
            block,
            gl.where(word == 2, tile, gl.where(word == 3, expert, gl.where(word == 4, valid, 0))),
        ),
    )
    rings.tasks.index(slot).store(record)
    cta_barrier()
    mbarrier.arrive(rings.task_full.index(slot), count=1)


@gluon.jit
def take_task(rings, i):
    """Task i of this CTA: (kind, block, tile, local expert, valid rows).  Every thread holds all
    words of the record.
    """
    slot = i % TASK_SLOTS
    mbarrier.wait(rings.task_full.index(slot), (i // TASK_SLOTS) & 1)
    layout: gl.constexpr = gl.BlockedLayout([TASK_WORDS], [32], [gl.num_warps()], [0])
    record = rings.tasks.index(slot).load(layout)
    word = gl.arange(0, TASK_WORDS, layout=layout)
    kind = gl.sum(gl.where(word == 0, record, 0), 0)
    block = gl.sum(gl.where(word == 1, record, 0), 0)
    tile = gl.sum(gl.where(word == 2, record, 0), 0)
    expert = gl.sum(gl.where(word == 3, record, 0), 0)
    valid = gl.sum(gl.where(word == 4, record, 0), 0)
    return kind, block, tile, expert, valid


@gluon.jit
def steps_of_task(kind, spec: gl.constexpr):
    """Stages that the task takes from the ring."""
    steps = gl.where(kind == LINEAR1, spec.l1_steps, spec.l2_steps)
    return gl.where(kind == REHEARSAL, spec.l1_turns * spec.rehearsal_steps, steps)


@gluon.jit
def release_task(rings, i):
    """This role is through with task i: its slot may be written again."""
    mbarrier.arrive(rings.task_empty.index(i % TASK_SLOTS), count=1)
