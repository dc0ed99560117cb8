"""Which tile comes when: a pure function of the rows each local expert receives, walked by one
warp of each CTA.

Pool blocks are numbered expert by expert.  L1 runs `lag` blocks ahead of L2:

    L1(0) .. L1(lag-1)   then for each block s:  L1(lag+s), L2(s)   then L2 of the last lag blocks

where L1(b) and L2(b) stand for all tiles of block b.  Program p takes tiles p, p + programs, ...
Every tile depends only on tiles before it, so programs that walk their share in order cannot
deadlock.  The schedule warp writes each tile as a task record into a small ring in shared memory;
loaders and math read it from there.
"""

from megamoe.kernel.compat import cta_barrier, gl, gluon, mbarrier
from megamoe.kernel.context import TASK_SLOTS, TASK_WORDS
from megamoe.kernel.sync import PHASE_COUNTS, wait_sys

LINEAR1 = gl.constexpr(0)
LINEAR2 = gl.constexpr(1)
DONE = gl.constexpr(2)


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
def tile_at(t, blocks, spec: gl.constexpr):
    """The t-th tile of the schedule over `blocks` blocks: (kind, block, tile within the block)."""
    c1: gl.constexpr = spec.l1_tiles
    c2: gl.constexpr = spec.l2_tiles
    lag = gl.minimum(blocks, spec.lag)
    if spec.phases != "fused":
        lag = blocks
    head = lag * c1
    middle = (blocks - lag) * (c1 + c2)
    u = gl.maximum(t - head, 0)
    within = u % (c1 + c2)
    v = gl.maximum(t - head - middle, 0)
    in_head = t < head
    in_middle = (t >= head) & (t < head + middle)
    is_l1 = in_head | (in_middle & (within < c1))
    block = gl.where(
        in_head,
        t // c1,
        gl.where(in_middle, u // (c1 + c2) + gl.where(within < c1, lag, 0), blocks - lag + v // c2),
    )
    tile = gl.where(
        in_head, t % c1, gl.where(in_middle, gl.where(within < c1, within, within - c1), v % c2)
    )
    return gl.where(is_l1, LINEAR1, LINEAR2), block, tile


@gluon.jit
def schedule_role(ctx, rings):
    """One warp: wait for the counts, then write this program's tasks one after another, and DONE
    at the end.
    """
    spec: gl.constexpr = ctx.spec
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    rows = rows_of_experts(ctx, layout)
    first, blocks = first_blocks(rows, spec.block_m)
    start = 0
    end = blocks * (spec.l1_tiles + spec.l2_tiles)
    if spec.phases == "linear1":
        end = blocks * spec.l1_tiles
    if spec.phases == "linear2":
        start = blocks * spec.l1_tiles
    if (spec.phases == "dispatch") | (spec.phases == "combine"):
        end = 0
    i = 0
    for t in range(start + gl.program_id(0), end, gl.num_programs(0)):
        kind, block, tile = tile_at(t, blocks, spec)
        expert, valid = block_owner(block, rows, first, spec.block_m, layout, spec.expert_lanes)
        put_task(rings, i, kind, block, tile, expert, valid)
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
def release_task(rings, i):
    """This role is through with task i: its slot may be written again."""
    mbarrier.arrive(rings.task_empty.index(i % TASK_SLOTS), count=1)
