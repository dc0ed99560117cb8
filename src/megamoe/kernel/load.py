"""The two loader warps: weights and tokens, stage by stage, through TMA into the ring of operands.

They walk the same tasks and the same stages; a stage is full when the bytes of both have landed.
Where there is an expander, weights land in its ring and it fills the stage in the loader's place.
"""

from megamoe.kernel.compat import gl, gluon, mbarrier, tma_load
from megamoe.kernel.epilogue import L1_ROWS
from megamoe.kernel.schedule import DONE, LINEAR2, REHEARSAL, release_task, steps_of_task, take_task
from megamoe.kernel.sync import PHASE_L1, PHASE_ROWS, PHASE_UNPACKED, fence_async_proxy, wait_gpu
from megamoe.kernel.trace import LOAD_TOKENS, LOAD_WEIGHTS, now, record
from megamoe.kernel.unpack import unpacked_of


@gluon.jit
def free_stage(full, empty, step, BYTES: gl.constexpr, STAGES: gl.constexpr):
    """Wait until a stage has been read, and announce the bytes that come."""
    stage = step % STAGES
    mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(full.index(stage), BYTES)
    return stage


@gluon.jit
def wait_landed(rings, step, spec: gl.constexpr):
    """Until the weights of all steps but the last `in_flight` before this one have landed."""
    if spec.in_flight < spec.packed_stages:
        if step >= spec.in_flight:
            before = step - spec.in_flight
            phase = (before // spec.packed_stages) & 1
            mbarrier.wait(rings.packed_full.index(before % spec.packed_stages), phase)


@gluon.jit
def load_weight_tile(
    desc,
    factors,
    expert,
    row,
    rings,
    step,
    first,
    last,
    ROWS: gl.constexpr,
    STEPS: gl.constexpr,
    spec: gl.constexpr,
):
    """Stages `first` to `last` - 1 of the rows from `row` of a matrix with ROWS rows and STEPS
    stages an expert, with their factors if the recipe has any.
    """
    columns: gl.constexpr = desc.block_shape[1]
    for k in range(first, last):
        wait_landed(rings, step, spec)
        stage = free_stage(
            rings.packed_full, rings.packed_empty, step, spec.packed_bytes, spec.packed_stages
        )
        full = rings.packed_full.index(stage)
        tma_load(desc, [expert * ROWS + row, k * columns], full, rings.packed.index(stage))
        if spec.factor_rows > 0:
            factor = (expert * STEPS + k) * spec.factor_rows
            tma_load(factors, [factor, row], full, rings.factors.index(stage))
        step += 1
    return step


@gluon.jit
def load_token_tile(
    desc,
    scales,
    row,
    valid,
    rings,
    step,
    steps,
    SCALE_ROWS: gl.constexpr,
    spec: gl.constexpr,
):
    """Rows of the pool, and with each stage the scales of its K groups if they are applied in the
    K loop.  Of a wide block only the half in which it has rows.
    """
    BOX: gl.constexpr = spec.box_m
    scale_bytes: gl.constexpr = SCALE_ROWS * spec.block_m * 4
    half_bytes: gl.constexpr = BOX * spec.block_k * spec.x_bytes
    for k in range(steps):
        stage = step % spec.stages
        full = rings.full.index(stage)
        x = rings.x.index(stage)
        if (spec.block_m > BOX) and (valid > BOX):
            free_stage(rings.full, rings.empty, step, spec.stage_bytes_x + scale_bytes, spec.stages)
            tma_load(desc, [row + BOX, k * spec.block_k], full, x.slice(spec.block_m - BOX, BOX, 0))
        else:
            free_stage(rings.full, rings.empty, step, half_bytes + scale_bytes, spec.stages)
        tma_load(desc, [row, k * spec.block_k], full, x.slice(0, BOX, 0))
        if SCALE_ROWS > 0:
            tma_load(
                scales,
                [k * SCALE_ROWS, row],
                full,
                rings.x_scale.index(stage).slice(0, SCALE_ROWS, 0),
            )
        step += 1
    return step


@gluon.jit
def wait_unpacked(ctx, expert):
    """Until every program has unpacked its share of an expert."""
    spec: gl.constexpr = ctx.spec
    seen = wait_gpu(
        unpacked_of(ctx, expert),
        gl.num_programs(0),
        ctx.status(),
        PHASE_UNPACKED,
        expert,
        spec.timeout_ns,
    )
    fence_async_proxy(seen)


@gluon.jit
def load_weights_role(ctx, rings):
    """One warp.  Weights depend on nobody, unless dispatch unpacks them: it runs ahead as far as
    the ring allows.

    At the start of the call the first rows come through the same memory, in a chain of dependent
    accesses that a full ring of weights would delay: after one stage, they go first.
    """
    spec: gl.constexpr = ctx.spec
    arrived = ctx.block_counters(spec.offset.arrived)
    FIRST: gl.constexpr = 1 if spec.rehearses else 0
    step = 0
    i = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        begin = now(ctx)
        if kind != LINEAR2:
            rows: gl.constexpr = 2 * spec.padded_intermediate
            steps: gl.constexpr = spec.padded_hidden // spec.packed_k
            last = gl.where(kind == REHEARSAL, 1, steps)
            if spec.unpacks:
                if kind != REHEARSAL:
                    wait_unpacked(ctx, expert)
            # TMA fills rows past the end of a matrix with zeros
            expert = gl.where(kind == REHEARSAL, spec.experts_per_rank, expert)
            for turn in range(spec.l1_turns):
                row = tile * L1_ROWS + turn * spec.block_n
                k = 0
                if (i == FIRST) & (turn == 0):
                    k = 1
                    step = load_weight_tile(
                        ctx.w1, ctx.w1_factor, expert, row, rings, step, 0, k, rows, steps, spec
                    )
                    wait_gpu(
                        arrived + block,
                        spec.block_m,
                        ctx.status(),
                        PHASE_ROWS,
                        block,
                        spec.timeout_ns,
                    )
                step = load_weight_tile(
                    ctx.w1, ctx.w1_factor, expert, row, rings, step, k, last, rows, steps, spec
                )
        else:
            rows2: gl.constexpr = spec.padded_hidden
            steps2: gl.constexpr = spec.padded_intermediate // spec.packed_k
            row = tile * spec.block_n
            if spec.unpacks:
                wait_unpacked(ctx, expert)
            step = load_weight_tile(
                ctx.w2, ctx.w2_factor, expert, row, rings, step, 0, steps2, rows2, steps2, spec
            )
        record(ctx, LOAD_WEIGHTS, i, kind, block, tile, begin, begin, now(ctx))
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)


@gluon.jit
def load_tokens_role(ctx, rings):
    """One warp.  Waits for the block's rows (L1) or for its L1 tiles (L2), then loads them from
    the pool.
    """
    spec: gl.constexpr = ctx.spec
    arrived = ctx.block_counters(spec.offset.arrived)
    l1_done = ctx.block_counters(spec.offset.l1_done)
    step = 0
    i = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        begin = now(ctx)
        row = (block % spec.ring_blocks) * spec.block_m
        steps = steps_of_task(kind, spec)
        if kind != LINEAR2:
            wanted = gl.where(kind == REHEARSAL, 0, spec.block_m)
            # zeros, see above, to both math partitions
            row = gl.where(kind == REHEARSAL, spec.ring_rows, row)
            valid = gl.where(kind == REHEARSAL, spec.block_m, valid)
            seen = wait_gpu(
                arrived + block, wanted, ctx.status(), PHASE_ROWS, block, spec.timeout_ns
            )
            fence_async_proxy(seen)
            ready = now(ctx)
            for _ in range(spec.l1_turns):
                step = load_token_tile(
                    ctx.pool_x,
                    ctx.pool_x_scale,
                    row,
                    valid,
                    rings,
                    step,
                    steps // spec.l1_turns,
                    spec.l1_scale_rows,
                    spec,
                )
        else:
            if spec.phases == "fused":
                seen = wait_gpu(
                    l1_done + block, spec.l1_tiles, ctx.status(), PHASE_L1, block, spec.timeout_ns
                )
                fence_async_proxy(seen)
            ready = now(ctx)
            step = load_token_tile(
                ctx.pool_h,
                ctx.pool_h_scale,
                row,
                valid,
                rings,
                step,
                steps,
                spec.l2_scale_rows,
                spec,
            )
        record(ctx, LOAD_TOKENS, i, kind, block, tile, begin, ready, now(ctx))
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
