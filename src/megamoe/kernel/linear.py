"""The matrix products: K loops of each recipe, over the tiles of this CTA.

Two families.  Weights first ("swap-AB"): weight rows are the M side of WGMMA and few tokens its N
side.  Tokens first: 64 tokens a partition are the M side, the 128 weight rows of a tile the N side.
In both, gate and up of a column lie in one thread, since their rows are interleaved by 8.  All
recipes walk K upwards and promote at the same places, so a row's bits do not depend on the family
or the tile.  MXFP4 is FP8 here: its codes were expanded before (:mod:`megamoe.kernel.expand`).
"""

from megamoe import plan
from megamoe.kernel.combine import combine_role
from megamoe.kernel.compat import (
    cta_barrier,
    gl,
    gluon,
    mbarrier,
    reinterpret,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from megamoe.kernel.context import MATH_PARTITIONS, TASK_SLOTS
from megamoe.kernel.epilogue import (
    H_GROUP,
    ROWS,
    activate_tokens_first,
    activate_weights_first,
    along_tokens,
    along_weights,
    push,
    store_accumulator,
)
from megamoe.kernel.schedule import DONE, LINEAR1, release_task, take_task
from megamoe.kernel.trace import now, record

K_GROUP = gl.constexpr(plan.K_GROUP)  # K between two promotions where no scale asks for more


@gluon.jit
def take_stage(rings, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(rings.full.index(stage), (step // STAGES) & 1)
    return stage


@gluon.jit
def operands(
    spec: gl.constexpr, rings, stage, START: gl.constexpr, LENGTH: gl.constexpr, PART: gl.constexpr
):
    """The two sides of a stage's product over LENGTH of its K from START: this partition's 64 rows,
    and all rows of the other matrix as columns.
    """
    w = rings.w.index(stage).slice(START, LENGTH, 1)
    x = rings.x.index(stage).slice(START, LENGTH, 1)
    if spec.tokens_first:
        return x.slice(PART * ROWS, ROWS, 0), w.permute((1, 0))
    else:
        return w.slice(PART * ROWS, ROWS, 0), x.permute((1, 0))


@gluon.jit
def token_scales(
    spec: gl.constexpr, rings, stage, G: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr
):
    """Scales of the stage's tokens for its K group G, to be multiplied to an accumulator."""
    if spec.tokens_first:
        # a plain view: Triton 3.6 reads a transposed unswizzled tile from the wrong addresses
        HALVES: gl.constexpr = spec.block_m // ROWS
        VIEW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        STAGES: gl.constexpr = spec.stages
        PER_STAGE: gl.constexpr = spec.stage_scale_rows * HALVES
        plain = reinterpret(rings.x_scale, gl.float32, [STAGES * PER_STAGE, ROWS], VIEW)
        return plain.index(stage * PER_STAGE + G * HALVES + PART).load(gl.SliceLayout(1, layout))[
            :, None
        ]
    else:
        return rings.x_scale.index(stage).slice(G, 1, 0).load(layout)


@gluon.jit
def weight_scales(
    spec: gl.constexpr,
    rings,
    stage,
    BLOCK: gl.constexpr,
    UP: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """128 x 128 scales of the stage's weight rows for its 128 of K numbered BLOCK, to be multiplied
    to an accumulator.

    With tokens first, the 128 rows of a tile lie in one block (L2, UP = 0) or in one block of gate
    and one of up, 8 rows in turn (UP = 8).
    """
    # plain views: see token_scales
    VIEW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    ROWS_OF_STAGE: gl.constexpr = spec.factor_rows
    BLOCKS: gl.constexpr = spec.packed_stages * ROWS_OF_STAGE
    block = stage * ROWS_OF_STAGE + BLOCK
    if spec.tokens_first:
        FOURS: gl.constexpr = spec.block_n // 4
        fours = reinterpret(rings.factors, gl.float32, [BLOCKS * FOURS, 4], VIEW)
        each: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        # four equal numbers, all in every thread
        gate = gl.max(fours.index(block * FOURS).load(each), 0)
        up = gl.max(fours.index(block * FOURS + UP // 4).load(each), 0)
        columns = gl.arange(0, spec.block_n, layout=gl.SliceLayout(0, layout))
        return gl.where(columns % 16 < 8, gate, up)[None, :]
    else:
        HALVES: gl.constexpr = BLOCKS * MATH_PARTITIONS
        plain = reinterpret(rings.factors, gl.float32, [HALVES, ROWS], VIEW)
        return plain.index(block * MATH_PARTITIONS + PART).load(gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def group_scales(
    spec: gl.constexpr,
    rings,
    stage,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    W_SCALED: gl.constexpr,
    UP: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """What the product over K group G of a stage is to be multiplied with.

    Scales are multiplied with each other first: with tokens first a thread has four such products.
    """
    scale = token_scales(spec, rings, stage, G, PART, layout)
    if W_SCALED:
        scale = scale * weight_scales(spec, rings, stage, G * GROUP // 128, UP, PART, layout)
    return scale


@gluon.jit
def k_loop_bf16(
    spec: gl.constexpr, rings, step, K: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr
):
    """One fp32 accumulator over all of K; the product of a step runs while the next stage
    arrives.
    """
    COLUMNS: gl.constexpr = spec.tile_columns
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for k in range(K // spec.block_k):
        stage = take_stage(rings, step, spec.stages)
        a, b = operands(spec, rings, stage, 0, spec.block_k, PART)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        if k > 0:
            mbarrier.arrive(rings.empty.index((step - 1) % spec.stages), count=1)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(rings.empty.index((step - 1) % spec.stages), count=1)
    return acc, step


@gluon.jit
def begin_group(
    spec: gl.constexpr,
    rings,
    stage,
    G: gl.constexpr,
    GROUP: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """Begin the product over K group G of a stage; the result is unfinished."""
    COLUMNS: gl.constexpr = spec.tile_columns
    a, b = operands(spec, rings, stage, G * GROUP, GROUP, PART)
    zero = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    return warpgroup_mma(a, b, zero, is_async=True)


@gluon.jit
def k_loop_fp8(
    spec: gl.constexpr,
    rings,
    step,
    UP: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    W_SCALED: gl.constexpr,
    X_SCALED: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """Promoted to fp32 every GROUP of K, where the scales of the group are applied if it has any.

    Scales of x and of the weights come with the stage; `UP` as in :func:`weight_scales`.
    """
    COLUMNS: gl.constexpr = spec.tile_columns
    steps: gl.constexpr = K // spec.block_k
    GROUPS: gl.constexpr = spec.block_k // GROUP
    # of small products; two large ones do not fit into registers
    PAIR: gl.constexpr = 2 if (GROUPS > 1) and (COLUMNS <= 32) else 1
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for _ in range(steps):
        stage = take_stage(rings, step, spec.stages)
        for g in gl.static_range(0, GROUPS, PAIR):
            part = begin_group(spec, rings, stage, g, GROUP, PART, layout)
            if PAIR == 2:
                # both products are under way before the first is waited for
                second = begin_group(spec, rings, stage, g + 1, GROUP, PART, layout)
            if X_SCALED:
                scale = group_scales(spec, rings, stage, g, GROUP, W_SCALED, UP, PART, layout)
                if PAIR == 2:
                    second_scale = group_scales(
                        spec, rings, stage, g + 1, GROUP, W_SCALED, UP, PART, layout
                    )
            if PAIR == 2:
                part, second = warpgroup_mma_wait(0, deps=[part, second])
            else:
                part = warpgroup_mma_wait(0, deps=[part])
            if g + PAIR == GROUPS:
                mbarrier.arrive(rings.empty.index(stage), count=1)
            if X_SCALED:
                acc += part * scale
            else:
                acc += part
            if PAIR == 2:
                if X_SCALED:
                    acc += second * second_scale
                else:
                    acc += second
        step += 1
    return acc, step


@gluon.jit
def promote(acc, product, scale, SCALED: gl.constexpr):
    if SCALED:
        return acc + product * scale
    else:
        return acc + product


@gluon.jit
def k_loop_wide(
    spec: gl.constexpr,
    rings,
    step,
    UP: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    W_SCALED: gl.constexpr,
    X_SCALED: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """As :func:`k_loop_fp8`, two products in turn: the first is promoted while the second is under
    way.
    """
    COLUMNS: gl.constexpr = spec.tile_columns
    STAGES: gl.constexpr = 2 * GROUP // spec.block_k  # of a turn
    SECOND: gl.constexpr = 2 - STAGES  # which group of its stage the second product is
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for _ in range(K // (2 * GROUP)):
        stage = take_stage(rings, step, spec.stages)
        first = begin_group(spec, rings, stage, 0, GROUP, PART, layout)
        later = stage
        if STAGES == 2:
            later = take_stage(rings, step + 1, spec.stages)
        second = begin_group(spec, rings, later, SECOND, GROUP, PART, layout)
        scale = 0.0
        later_scale = 0.0
        if X_SCALED:
            scale = group_scales(spec, rings, stage, 0, GROUP, W_SCALED, UP, PART, layout)
            later_scale = group_scales(
                spec, rings, later, SECOND, GROUP, W_SCALED, UP, PART, layout
            )
        first, second = warpgroup_mma_wait(1, deps=[first, second])
        if STAGES == 2:
            mbarrier.arrive(rings.empty.index(stage), count=1)
        acc = promote(acc, first, scale, X_SCALED)
        second = warpgroup_mma_wait(0, deps=[second])
        mbarrier.arrive(rings.empty.index(later), count=1)
        acc = promote(acc, second, later_scale, X_SCALED)
        step += STAGES
    return acc, step


@gluon.jit
def k_loop_scaled(
    spec: gl.constexpr,
    rings,
    step,
    UP: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    W_SCALED: gl.constexpr,
    X_SCALED: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    if spec.in_pairs:
        return k_loop_wide(spec, rings, step, UP, K, GROUP, W_SCALED, X_SCALED, PART, layout)
    else:
        return k_loop_fp8(spec, rings, step, UP, K, GROUP, W_SCALED, X_SCALED, PART, layout)


@gluon.jit
def linear1(ctx, rings, step, block, tile, expert, valid, PART: gl.constexpr, layout: gl.constexpr):
    """The L1 accumulator of one partition, all scales applied: fp32 [ROWS, tile_columns]."""
    spec: gl.constexpr = ctx.spec
    K: gl.constexpr = spec.padded_hidden
    n_rows: gl.constexpr = 2 * spec.padded_intermediate
    row0 = tile * spec.block_n
    if spec.recipe == "bf16":
        acc, step = k_loop_bf16(spec, rings, step, K, PART, layout)
    elif spec.recipe == "fp8_block":
        acc, step = k_loop_scaled(spec, rings, step, 8, K, K_GROUP, True, True, PART, layout)
    else:
        acc, step = k_loop_scaled(spec, rings, step, 0, K, K_GROUP, False, False, PART, layout)
        token = along_tokens(spec, layout, PART)
        pool_scale = (
            ctx.region(spec.offset.pool_x_scale, gl.float32)
            + (block % spec.ring_blocks) * spec.block_m
        )
        x_scale = gl.load(pool_scale + token, mask=token < valid, other=0.0, cache_modifier=".cg")
        acc = (
            acc
            * gl.load(ctx.w1_scale + expert * n_rows + row0 + along_weights(spec, layout, PART))
            * x_scale
        )
    return acc, step


@gluon.jit
def linear2(ctx, rings, step, tile, expert, PART: gl.constexpr, layout: gl.constexpr):
    """The L2 accumulator of one partition, all scales applied: fp32 [ROWS, tile_columns]."""
    spec: gl.constexpr = ctx.spec
    K: gl.constexpr = spec.padded_intermediate
    n_rows: gl.constexpr = spec.padded_hidden
    row0 = tile * spec.block_n
    if spec.recipe == "bf16":
        acc, step = k_loop_bf16(spec, rings, step, K, PART, layout)
    elif spec.recipe == "fp8_block":
        acc, step = k_loop_scaled(spec, rings, step, 0, K, H_GROUP, True, True, PART, layout)
    else:
        acc, step = k_loop_scaled(spec, rings, step, 0, K, H_GROUP, False, True, PART, layout)
        acc = acc * gl.load(
            ctx.w2_scale + expert * n_rows + row0 + along_weights(spec, layout, PART)
        )
    return acc, step


@gluon.jit
def pass_by(rings, step, stages, STAGES: gl.constexpr):
    """Walk a tile of `stages` stages in which this partition has no tokens."""
    for _ in range(stages):
        stage = take_stage(rings, step, STAGES)
        mbarrier.arrive(rings.empty.index(stage), count=1)
        step += 1
    return step


@gluon.jit
def math_role(ctx, rings, PART: gl.constexpr):
    """One warpgroup of four warps: 64 rows of every tile of this CTA."""
    spec: gl.constexpr = ctx.spec
    COLUMNS: gl.constexpr = spec.tile_columns
    k_instruction: gl.constexpr = 32 // spec.x_bytes
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, k_instruction]
    )
    step = 0
    i = 0
    l1_count = 0
    steps1: gl.constexpr = spec.padded_hidden // spec.block_k
    steps2: gl.constexpr = spec.padded_intermediate // spec.block_k
    kind, block, tile, expert, valid = take_task(rings, i)
    begin = now(ctx)
    while kind != DONE:
        middle = begin
        if spec.tokens_first and (PART * ROWS >= valid):
            step = pass_by(rings, step, gl.where(kind == LINEAR1, steps1, steps2), spec.stages)
        elif kind == LINEAR1:
            acc, step = linear1(ctx, rings, step, block, tile, expert, valid, PART, layout)
            middle = now(ctx)
            if spec.phases != "fused":
                store_accumulator(ctx, acc, block, tile, valid, PART, layout)
            elif spec.tokens_first:
                activate_tokens_first(ctx, acc, block, tile, valid, PART)
            else:
                activate_weights_first(ctx, rings, acc, l1_count, block, tile, valid, PART)
            l1_count += 1
        else:
            acc, step = linear2(ctx, rings, step, tile, expert, PART, layout)
            middle = now(ctx)
            push(ctx, acc, block, tile, valid, PART)
        cta_barrier()
        mbarrier.arrive(rings.tile_done.index(i % TASK_SLOTS), count=1)
        end = now(ctx)
        record(ctx, PART, i, kind, block, tile, begin, middle, end)
        begin = end  # reading the timer is most of what a timeline costs
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
    if spec.phases == "fused":
        combine_role(ctx, PART + 1, MATH_PARTITIONS + 1, PART, i)
