"""The matrix products: K loops of each recipe, over the tiles of this CTA.

Two families.  Weights first ("swap-AB"): weight rows are the M side of WGMMA and few tokens its N
side.  Tokens first: 64 tokens a partition are the M side, 128 weight rows the N side.
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
    HALF_N,
    L1_ROWS,
    ROWS,
    activate,
    along_tokens,
    along_weights,
    origins,
    owners_rows,
    push,
    router_weights,
    store_accumulator,
    store_activated,
)
from megamoe.kernel.expand import expand_codes
from megamoe.kernel.schedule import DONE, LINEAR2, REHEARSAL, release_task, steps_of_task, take_task
from megamoe.kernel.trace import now, record_begin, record_end

K_GROUP = gl.constexpr(plan.K_GROUP)  # K between two promotions where no scale asks for more


@gluon.jit
def take_stage(rings, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(rings.full.index(stage), (step // STAGES) & 1)
    return stage


@gluon.jit
def give_back(rings, step, STAGES: gl.constexpr):
    """The stage of a step has been read."""
    mbarrier.arrive(rings.empty.index(step % STAGES), count=1)


@gluon.jit
def operands(
    spec: gl.constexpr,
    rings,
    stage,
    START: gl.constexpr,
    LENGTH: gl.constexpr,
    PART: gl.constexpr,
    HALF: gl.constexpr,
):
    """The two sides of a stage's product over LENGTH of its K from START: this partition's 64 rows,
    and rows of the other matrix as columns, with tokens first a half of 128 weight rows, else all
    tokens.
    """
    w = rings.w.index(stage).slice(START, LENGTH, 1)
    x = rings.x.index(stage).slice(START, LENGTH, 1)
    if spec.tokens_first:
        return x.slice(PART * ROWS, ROWS, 0), w.slice(HALF * HALF_N, HALF_N, 0).permute((1, 0))
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
def row_words(
    spec: gl.constexpr,
    rings,
    dtype: gl.constexpr,
    stage,
    G: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """With weights first: the factors of this partition's 64 rows for K group G of a stage."""
    # a plain view: see token_scales
    VIEW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = spec.stages * spec.factor_rows * MATH_PARTITIONS
    plain = reinterpret(rings.factors, dtype, [LINES, ROWS], VIEW)
    return plain.index((stage * spec.factor_rows + G) * MATH_PARTITIONS + PART).load(layout)


@gluon.jit
def weight_scales(
    spec: gl.constexpr,
    rings,
    stage,
    G: gl.constexpr,
    UP: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """128 x 128 scales of the stage's weight rows for its K group G, to be multiplied to an
    accumulator.

    With tokens first, the 128 rows of a stage lie in one block (L2, UP = 0) or in one block of gate
    and one of up, 8 rows in turn (UP = 8).
    """
    if spec.tokens_first:
        VIEW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        FOURS: gl.constexpr = spec.block_n // 4
        BLOCKS: gl.constexpr = spec.stages * spec.factor_rows
        fours = reinterpret(rings.factors, gl.float32, [BLOCKS * FOURS, 4], VIEW)
        each: gl.constexpr = gl.BlockedLayout([4], [32], [gl.num_warps()], [0])
        first = (stage * spec.factor_rows + G) * FOURS
        # four equal numbers, all in every thread
        gate = gl.max(fours.index(first).load(each), 0)
        up = gl.max(fours.index(first + UP // 4).load(each), 0)
        columns = gl.arange(0, HALF_N, layout=gl.SliceLayout(0, layout))
        return gl.where(columns % 16 < 8, gate, up)[None, :]
    else:
        rows: gl.constexpr = gl.SliceLayout(1, layout)
        return row_words(spec, rings, gl.float32, stage, G, PART, rows)[:, None]


@gluon.jit
def group_scales(
    spec: gl.constexpr,
    rings,
    stage,
    G: gl.constexpr,
    UP: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """What the product over K group G of a stage is to be multiplied with.

    Scales are multiplied with each other first: with tokens first a thread has four such products.
    """
    scale = token_scales(spec, rings, stage, G, PART, layout)
    if spec.recipe == "fp8_block":
        scale = scale * weight_scales(spec, rings, stage, G, UP, PART, layout)
    return scale


@gluon.jit
def begin_expanded(
    spec: gl.constexpr, rings, stage, G: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr
):
    """As :func:`begin_product`, of MXFP4 codes: expanded into registers, from which WGMMA takes its
    M side.  So shared memory moves half of what it would with expanded weights in it.

    One operation over the whole group: each has a fence of its own.
    """
    COLUMNS: gl.constexpr = spec.tile_columns
    side: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    codes = rings.w.index(stage).slice(PART * ROWS, ROWS, 0)
    x = rings.x.index(stage).slice(G * K_GROUP, K_GROUP, 1)
    offsets = row_words(spec, rings, gl.int32, stage, G, PART, gl.SliceLayout(1, side))[:, None]
    k0, k32 = expand_codes(codes.slice(G * K_GROUP // 2, 32, 1).load(side), offsets)
    k64, k96 = expand_codes(codes.slice(G * K_GROUP // 2 + 32, 32, 1).load(side), offsets >> 16)
    values = gl.join(gl.join(k0, k32), gl.join(k64, k96)).permute((0, 3, 2, 1))
    values = gl.convert_layout(values.reshape((ROWS, K_GROUP)), side)  # nothing changes its thread
    zero = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    return warpgroup_mma(values, x.permute((1, 0)), zero, is_async=True)


@gluon.jit
def begin_product(
    spec: gl.constexpr,
    rings,
    stage,
    G: gl.constexpr,
    PART: gl.constexpr,
    HALF: gl.constexpr,
    layout: gl.constexpr,
):
    """Begin the product over K group G of a stage; the result is unfinished."""
    COLUMNS: gl.constexpr = spec.tile_columns
    if spec.expands:
        return begin_expanded(spec, rings, stage, G, PART, layout)
    else:
        a, b = operands(spec, rings, stage, G * K_GROUP, K_GROUP, PART, HALF)
        zero = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
        return warpgroup_mma(a, b, zero, is_async=True)


@gluon.jit
def promote(acc, product, scale, SCALED: gl.constexpr):
    if SCALED:
        return acc + product * scale
    else:
        return acc + product


@gluon.jit
def k_loop_bf16(spec: gl.constexpr, rings, step, steps, PART: gl.constexpr, layout: gl.constexpr):
    """One fp32 accumulator over all of K for each half; the products of a step run while the next
    stage arrives.
    """
    COLUMNS: gl.constexpr = spec.tile_columns
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    more = acc
    for k in range(steps):
        stage = take_stage(rings, step, spec.stages)
        a, b = operands(spec, rings, stage, 0, spec.block_k, PART, 0)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        if spec.halves == 2:
            a, b = operands(spec, rings, stage, 0, spec.block_k, PART, 1)
            more = warpgroup_mma(a, b, more, is_async=True)
            acc, more = warpgroup_mma_wait(2, deps=[acc, more])
        else:
            acc = warpgroup_mma_wait(1, deps=[acc])
        if k > 0:
            give_back(rings, step - 1, spec.stages)
        step += 1
    if spec.halves == 2:
        acc, more = warpgroup_mma_wait(0, deps=[acc, more])
    else:
        acc = warpgroup_mma_wait(0, deps=[acc])
    give_back(rings, step - 1, spec.stages)
    return acc, more, step


@gluon.jit
def k_loop_fp8(
    spec: gl.constexpr,
    rings,
    step,
    steps,
    SCALED: gl.constexpr,
    UP: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """Promoted to fp32 every K_GROUP, where the scales of the group are applied if it has any.

    Of a long stage the second group is under way while the first is promoted.  Scales of x and of
    the weights come with the stage; `UP` as in :func:`weight_scales`.  A stage whose scales were
    loaded is given back a turn later: a load is done when its value has been used, not before, and
    TMA does not queue behind it.
    """
    COLUMNS: gl.constexpr = spec.tile_columns
    TWO: gl.constexpr = spec.block_k // K_GROUP == 2
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    for k in range(steps):
        if SCALED:
            if k > 0:
                give_back(rings, step - 1, spec.stages)
        stage = take_stage(rings, step, spec.stages)
        scale = 0.0
        product = begin_product(spec, rings, stage, 0, PART, 0, layout)
        if SCALED:
            scale = group_scales(spec, rings, stage, 0, UP, PART, layout)
        if TWO:
            later = begin_product(spec, rings, stage, 1, PART, 0, layout)
            product = warpgroup_mma_wait(1, deps=[product])
            acc = promote(acc, product, scale, SCALED)
            if SCALED:
                scale = group_scales(spec, rings, stage, 1, UP, PART, layout)
            product = later
        product = warpgroup_mma_wait(0, deps=[product])
        if not SCALED:
            give_back(rings, step, spec.stages)
        acc = promote(acc, product, scale, SCALED)
        step += 1
    if SCALED:
        give_back(rings, step - 1, spec.stages)
    return acc, acc, step


@gluon.jit
def k_loop_halves(
    spec: gl.constexpr,
    rings,
    step,
    steps,
    SCALED: gl.constexpr,
    UP: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """As :func:`k_loop_fp8`, for stages of 256 weight rows and one K group: an accumulator for each
    half, one product at a time, since registers do not hold two.  So scales have been used for the
    first before the stage is given back after the second.
    """
    acc = gl.zeros((ROWS, HALF_N), gl.float32, layout)
    more = gl.zeros((ROWS, HALF_N), gl.float32, layout)
    for _ in range(steps):
        stage = take_stage(rings, step, spec.stages)
        scale = 0.0
        product = begin_product(spec, rings, stage, 0, PART, 0, layout)
        if SCALED:
            scale = group_scales(spec, rings, stage, 0, UP, PART, layout)
        product = warpgroup_mma_wait(0, deps=[product])
        acc = promote(acc, product, scale, SCALED)
        product = begin_product(spec, rings, stage, 0, PART, 1, layout)
        product = warpgroup_mma_wait(0, deps=[product])
        give_back(rings, step, spec.stages)
        more = promote(more, product, scale, SCALED)
        step += 1
    return acc, more, step


@gluon.jit
def k_loop(
    spec: gl.constexpr,
    rings,
    step,
    steps,
    SCALED: gl.constexpr,
    UP: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """Accumulators of the stage's weight rows, or of its first 128 and of the others if it has 256
    (else the same twice), and the next step.
    """
    if spec.recipe == "bf16":
        return k_loop_bf16(spec, rings, step, steps, PART, layout)
    elif spec.halves == 2:
        return k_loop_halves(spec, rings, step, steps, SCALED, UP, PART, layout)
    else:
        return k_loop_fp8(spec, rings, step, steps, SCALED, UP, PART, layout)


@gluon.jit
def row_scales(spec: gl.constexpr, scales, PART: gl.constexpr, layout: gl.constexpr):
    """Of the weight rows of an accumulator whose first is at `scales`, to broadcast over it."""
    return gl.load(scales + along_weights(spec, layout, PART))


@gluon.jit
def row_scaled_loop(
    spec: gl.constexpr,
    rings,
    step,
    steps,
    SCALED: gl.constexpr,
    UP: gl.constexpr,
    scales,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """:func:`k_loop`, times the scales of the weight rows if each has one; theirs begin at `scales`
    and with weights first are loaded before the loop.
    """
    early = 0.0
    if spec.row_scaled and not spec.tokens_first:
        early = row_scales(spec, scales, PART, layout)
    acc, more, step = k_loop(spec, rings, step, steps, SCALED, UP, PART, layout)
    if spec.row_scaled:
        if spec.tokens_first:
            acc = acc * row_scales(spec, scales, PART, layout)
            if spec.halves == 2:
                more = more * row_scales(spec, scales + HALF_N, PART, layout)
        else:
            acc = acc * early
    return acc, more, step


@gluon.jit
def linear1(ctx, rings, step, steps, row0, expert, PART: gl.constexpr, layout: gl.constexpr):
    """L1 accumulators of one partition for the weight rows from `row0` that one stage has, all
    scales but those of a token's whole row applied: see :func:`k_loop`.
    """
    spec: gl.constexpr = ctx.spec
    SCALED: gl.constexpr = spec.recipe == "fp8_block"
    scales = ctx.w1_scale + expert * (2 * spec.padded_intermediate) + row0
    return row_scaled_loop(spec, rings, step, steps, SCALED, 8, scales, PART, layout)


@gluon.jit
def linear2(ctx, rings, step, row0, expert, PART: gl.constexpr, layout: gl.constexpr):
    """As :func:`linear1`, of L2."""
    spec: gl.constexpr = ctx.spec
    scales = ctx.w2_scale + expert * spec.padded_hidden + row0
    return row_scaled_loop(spec, rings, step, spec.l2_steps, True, 0, scales, PART, layout)


@gluon.jit
def factors_of_tokens(ctx, block, valid, PART: gl.constexpr, layout: gl.constexpr):
    """Of each token: the scale of its row of x, 1.0 if it has none of its own, to broadcast over an
    L1 accumulator, and its router weight, to broadcast over L1's output.
    """
    spec: gl.constexpr = ctx.spec
    scale = 1.0
    if spec.row_scaled:
        token = along_tokens(spec, layout, PART)
        scales = ctx.region(spec.offset.pool_x_scale, gl.float32)
        scales += (block % spec.ring_blocks) * spec.block_m
        scale = gl.load(scales + token, mask=token < valid, other=0.0, cache_modifier=".cg")
    return scale, router_weights(ctx, block, valid, PART, layout)


@gluon.jit
def tile_of_l1(
    ctx,
    rings,
    step,
    steps,
    block,
    tile,
    expert,
    valid,
    count,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """256 weight rows, which are 128 columns of L1's output and one scale of each token: at once
    or, if a stage has 128 of them, one half after the other.

    `count` numbers the L1 tiles of this CTA.  Returns the next step and when the last K loop ended.
    """
    spec: gl.constexpr = ctx.spec
    row0 = tile * L1_ROWS
    if spec.early:
        # with its first stage a tile's tokens are there
        take_stage(rings, step, spec.stages)
        x_scale, weight = factors_of_tokens(ctx, block, valid, PART, layout)
    acc, more, step = linear1(ctx, rings, step, steps, row0, expert, PART, layout)
    if not spec.early:
        x_scale, weight = factors_of_tokens(ctx, block, valid, PART, layout)
    if spec.l1_turns == 1:
        middle = now(ctx)  # nothing moves across it: loads first
    acc = acc * x_scale
    if spec.phases != "fused":
        store_accumulator(ctx, acc, block, row0, valid, PART, layout)
    else:
        low = activate(spec, acc, weight)
        if spec.sets_aside:
            rings.aside.index(PART).store(low)
    if spec.l1_turns == 2:
        more, _, step = linear1(ctx, rings, step, steps, row0 + HALF_N, expert, PART, layout)
        if not spec.early:
            x_scale, weight = factors_of_tokens(ctx, block, valid, PART, layout)
        middle = now(ctx)
    more = more * x_scale
    if spec.phases != "fused":
        store_accumulator(ctx, more, block, row0 + HALF_N, valid, PART, layout)
    else:
        high = activate(spec, more, weight)
        if spec.sets_aside:
            low = rings.aside.index(PART).load(high.type.layout)
        store_activated(ctx, rings, low, high, count, block, tile, valid, PART)
    return step, middle


@gluon.jit
def tile_of_l2(
    ctx, rings, step, block, tile, expert, valid, PART: gl.constexpr, layout: gl.constexpr
):
    """The weight rows of a stage.  Returns the next step and when the K loop ended."""
    spec: gl.constexpr = ctx.spec
    row0 = tile * spec.block_n
    if spec.early:
        take_stage(rings, step, spec.stages)
        origin, real = origins(ctx, block, valid, PART)
    acc, more, step = linear2(ctx, rings, step, row0, expert, PART, layout)
    if not spec.early:
        origin, real = origins(ctx, block, valid, PART)
    middle = now(ctx)
    # not before: a load that waits for a load would keep the K loop waiting
    rows, real = owners_rows(ctx, origin, real)
    push(ctx, acc, rows, real, row0, PART)
    if spec.halves == 2:
        push(ctx, more, rows, real, row0 + HALF_N, PART)
    return step, middle


@gluon.jit
def pass_by(rings, step, stages, STAGES: gl.constexpr):
    """Walk a tile of `stages` stages in which this partition has no tokens."""
    for _ in range(stages):
        take_stage(rings, step, STAGES)
        give_back(rings, step, STAGES)
        step += 1
    return step


@gluon.jit
def math_role(ctx, rings, PART: gl.constexpr):
    """One warpgroup of four warps: a part of every tile of this CTA."""
    spec: gl.constexpr = ctx.spec
    COLUMNS: gl.constexpr = spec.tile_columns
    k_instruction: gl.constexpr = 32 // spec.x_bytes
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, k_instruction]
    )
    step = 0
    i = 0
    l1_count = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    begin = now(ctx)
    while kind != DONE:
        if not spec.early:  # wide tiles leave no register for it through the K loop
            record_begin(ctx, PART, i, kind, block, tile, begin)
        middle = begin
        stages = steps_of_task(kind, spec)
        if spec.tokens_first and (PART * ROWS >= valid) & (kind != REHEARSAL):
            step = pass_by(rings, step, stages, spec.stages)
        elif kind == LINEAR2:
            step, middle = tile_of_l2(ctx, rings, step, block, tile, expert, valid, PART, layout)
        else:
            step, middle = tile_of_l1(
                ctx,
                rings,
                step,
                stages // spec.l1_turns,
                block,
                tile,
                expert,
                valid,
                l1_count,
                PART,
                layout,
            )
            l1_count += 1
        cta_barrier()
        mbarrier.arrive(rings.tile_done.index(i % TASK_SLOTS), count=1)
        end = now(ctx)
        if spec.early:
            record_begin(ctx, PART, i, kind, block, tile, begin)
        record_end(ctx, PART, i, middle, end)
        begin = end  # read once for both
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
    if spec.phases == "fused":
        combine_role(ctx, PART + 1, MATH_PARTITIONS + 1, PART, i)
