"""The matrix products: K loops of each recipe, over the tiles of this CTA.

Two families.  Weights first ("swap-AB"): weight rows are the M side of WGMMA and few tokens its N
side; MXFP4 codes are expanded straight into the A operand, so MXFP4 always runs this way.  Tokens
first: 64 tokens a partition are the M side, the 128 weight rows of a tile the N side.  In both,
gate and up of a column lie in one thread, since their rows are interleaved by 8.  All recipes walk
K upwards and promote at the same places, so a row's bits do not depend on the family or the tile.
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
from megamoe.kernel.context import TASK_SLOTS
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

# A code of magnitude v becomes the e4m3 value v * 2^(d - 4), d being the exponent offset of its
# (row, 32) block: a table of eight bytes a block, in two registers.  $0, $1 table of the low
# codes, $2, $3 of the high; $4, $5 offsets.
TABLES = gl.constexpr("""
mad.lo.u32 $0, $4, 0x08080800, 0x1c181000;
mad.lo.u32 $1, $4, 0x08080808, 0x2c282420;
mad.lo.u32 $2, $5, 0x08080800, 0x1c181000;
mad.lo.u32 $3, $5, 0x08080808, 0x2c282420;
""")
# Four codes of k and four of k + 32 in a word -> two registers of e4m3: one byte permute looks
# four codes up.
# $0, $1 results; $2 the word; $3, $7, $11, $15 the tables (each given once for every byte of the
# word).
EXPAND = gl.constexpr("""
{
.reg .b32 sel, sel2, ra, rb, sb;
and.b32 sel, $2, 0x77777777;
shr.u32 sel2, sel, 16;
prmt.b32 ra, $3, $7, sel;
prmt.b32 rb, $11, $15, sel2;
shl.b32 sb, $2, 4;
lop3.b32 $0, $2, 0x80808080, ra, 0xEA;
lop3.b32 $1, sb, 0x80808080, rb, 0xEA;
}
""")


@gluon.jit
def code_tables(low_offset, high_offset):
    """int32 offsets of rows' low and high blocks -> their four table registers."""
    return gl.inline_asm_elementwise(
        TABLES,
        "=&r,=&r,=&r,=&r,r,r",
        [low_offset, high_offset],
        dtype=(gl.int32, gl.int32, gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def expand_codes(codes, low0, low1, high0, high1):
    """int8 [rows, 32] words of eight e2m1 codes and int32 [rows, 32] tables -> two e4m3 [rows, 32]
    of adjacent K.
    """
    return gl.inline_asm_elementwise(
        EXPAND,
        "=&r,=&r" + ",r" * 17,
        [codes, low0, low1, high0, high1],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def take_stage(rings, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(rings.full.index(stage), (step // STAGES) & 1)
    return stage


@gluon.jit
def operands(spec: gl.constexpr, rings, stage, PART: gl.constexpr):
    """The two sides of a stage's product: this partition's 64 rows, and all rows of the other
    matrix as columns.
    """
    if spec.tokens_first:
        return rings.x.index(stage).slice(PART * ROWS, ROWS, 0), rings.w.index(stage).permute(
            (1, 0)
        )
    else:
        return rings.w.index(stage).slice(PART * ROWS, ROWS, 0), rings.x.index(stage).permute(
            (1, 0)
        )


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
def weight_scales(spec: gl.constexpr, scales, UP: gl.constexpr, layout: gl.constexpr):
    """128 x 128 scales of a tile's weight rows for one K block, to be multiplied to an accumulator.

    `scales` points to those of the tile's (or, with weights first, this partition's) first row.
    With tokens first, the 128 rows of a tile lie in one block (L2, UP = 0) or in one block of gate
    and one of up, 8 rows in turn (UP = 8).
    """
    if spec.tokens_first:
        columns = gl.arange(0, spec.block_n, layout=gl.SliceLayout(0, layout))
        return gl.where(columns % 16 < 8, gl.load(scales), gl.load(scales + UP))[None, :]
    else:
        return gl.load(scales + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout)))[:, None]


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
        a, b = operands(spec, rings, stage, PART)
        acc = warpgroup_mma(a, b, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        if k > 0:
            mbarrier.arrive(rings.empty.index((step - 1) % spec.stages), count=1)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(rings.empty.index((step - 1) % spec.stages), count=1)
    return acc, step


@gluon.jit
def k_loop_fp8(
    spec: gl.constexpr,
    rings,
    step,
    w_scale,
    w_stride: gl.constexpr,
    UP: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    W_SCALED: gl.constexpr,
    X_SCALED: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """Promoted to fp32 every GROUP of K, where the scales of the group are applied if it has any.

    `w_scale` and `UP` as in :func:`weight_scales`, `w_stride` between K blocks; scales of x come
    with the stage.
    """
    COLUMNS: gl.constexpr = spec.tile_columns
    steps: gl.constexpr = K // spec.block_k
    acc = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
    if W_SCALED:
        next_scale = weight_scales(spec, w_scale, UP, layout)
    for k in range(steps):
        if W_SCALED:
            scale_w = next_scale
            # one step ahead, so that the load does not stall the next one
            next_scale = weight_scales(
                spec, w_scale + gl.minimum(k + 1, steps - 1) * w_stride, UP, layout
            )
        stage = take_stage(rings, step, spec.stages)
        a, b = operands(spec, rings, stage, PART)
        for g in gl.static_range(spec.block_k // GROUP):
            part = gl.zeros((ROWS, COLUMNS), gl.float32, layout)
            part = warpgroup_mma(
                a.slice(g * GROUP, GROUP, 1), b.slice(g * GROUP, GROUP, 0), part, is_async=True
            )
            if X_SCALED:
                scale = token_scales(spec, rings, stage, g, PART, layout)
            part = warpgroup_mma_wait(0, deps=[part])
            if g == spec.block_k // GROUP - 1:
                mbarrier.arrive(rings.empty.index(stage), count=1)
            if W_SCALED:
                part = part * scale_w
            if X_SCALED:
                acc += part * scale
            else:
                acc += part
        step += 1
    return acc, step


@gluon.jit
def mma_slice(w, x, low_offsets, high_offsets, part, J: gl.constexpr, operand: gl.constexpr):
    """Add the product over k = 64 J .. + 63, whose codes are bytes 32 J .. + 31 of a row."""
    codes = w.slice(32 * J, 32, 1).load(operand)
    zero = gl.zeros((ROWS, 32), gl.int32, operand)
    low0, low1, high0, high1 = code_tables(
        (low_offsets >> (8 * J)) & 0xFF, (high_offsets >> (8 * J)) & 0xFF
    )
    low, high = expand_codes(
        codes,
        low0[:, None] + zero,
        low1[:, None] + zero,
        high0[:, None] + zero,
        high1[:, None] + zero,
    )
    part = warpgroup_mma(low, x.slice(64 * J, 32, 0), part, is_async=True)
    return warpgroup_mma(high, x.slice(64 * J + 32, 32, 0), part, is_async=True)


@gluon.jit
def mma_group(
    spec: gl.constexpr,
    w,
    x,
    low_offsets,
    high_offsets,
    G: gl.constexpr,
    SLICES: gl.constexpr,
    operand: gl.constexpr,
    layout: gl.constexpr,
):
    """Begin the products of one K group; returns the unfinished part."""
    BLOCK_M: gl.constexpr = spec.block_m
    part = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
    for s in gl.static_range(SLICES):
        part = mma_slice(w, x, low_offsets, high_offsets, part, G * SLICES + s, operand)
    return part


@gluon.jit
def k_loop_mxfp4(
    spec: gl.constexpr,
    rings,
    step,
    offset,
    n_rows: gl.constexpr,
    K: gl.constexpr,
    GROUP: gl.constexpr,
    X_SCALED: gl.constexpr,
    PART: gl.constexpr,
    layout: gl.constexpr,
):
    """As :func:`k_loop_fp8`, the weights expanded from 4-bit codes in registers.

    `offset` points to two words a row and 256 of K: byte j belongs to k = 64 j .. + 31 and 64 j +
    32 .. + 63.
    """
    BLOCK_M: gl.constexpr = spec.block_m
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    steps: gl.constexpr = K // spec.block_k
    slices: gl.constexpr = GROUP // 64
    PAIR: gl.constexpr = 2 if BLOCK_M == 16 else 1
    acc = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
    low_offsets = gl.load(offset)
    high_offsets = gl.load(offset + n_rows)
    for k in range(steps):
        stage = take_stage(rings, step, spec.stages)
        w = rings.w.index(stage).slice(PART * ROWS, ROWS, 0)
        x = rings.x.index(stage).permute((1, 0))
        # one step ahead, so that the load does not stall the next one
        ahead = gl.minimum(k + 1, steps - 1) * (2 * n_rows)
        next_low = gl.load(offset + ahead)
        next_high = gl.load(offset + ahead + n_rows)
        for g in gl.static_range(0, spec.block_k // GROUP, PAIR):
            part = mma_group(spec, w, x, low_offsets, high_offsets, g, slices, operand, layout)
            if PAIR == 2:
                # both products are under way before the first is waited for
                second = mma_group(
                    spec, w, x, low_offsets, high_offsets, g + 1, slices, operand, layout
                )
                part, second = warpgroup_mma_wait(0, deps=[part, second])
            else:
                # acc too: else the sum before waits for the next product, and both parts spill
                part, acc = warpgroup_mma_wait(0, deps=[part, acc])
            if X_SCALED:
                part_scale = token_scales(spec, rings, stage, g, PART, layout)
                if PAIR == 2:
                    second_scale = token_scales(spec, rings, stage, g + 1, PART, layout)
            if g == spec.block_k // GROUP - PAIR:
                mbarrier.arrive(rings.empty.index(stage), count=1)
            if X_SCALED:
                acc += part * part_scale
                if PAIR == 2:
                    acc += second * second_scale
            else:
                acc += part
                if PAIR == 2:
                    acc += second
        low_offsets = next_low
        high_offsets = next_high
        step += 1
    return acc, step


@gluon.jit
def linear1(ctx, rings, step, block, tile, expert, valid, PART: gl.constexpr, layout: gl.constexpr):
    """The L1 accumulator of one partition, all scales applied: fp32 [ROWS, tile_columns]."""
    spec: gl.constexpr = ctx.spec
    K: gl.constexpr = spec.padded_hidden
    n_rows: gl.constexpr = 2 * spec.padded_intermediate
    row0 = tile * spec.block_n
    part0: gl.constexpr = 0 if spec.tokens_first else PART * ROWS
    if spec.recipe == "bf16":
        acc, step = k_loop_bf16(spec, rings, step, K, PART, layout)
    elif spec.recipe == "fp8_block":
        w_scale = ctx.w1_scale + expert * (K // 128 * n_rows) + row0 + part0
        acc, step = k_loop_fp8(
            spec, rings, step, w_scale, n_rows, 8, K, K_GROUP, True, True, PART, layout
        )
    else:
        if spec.recipe == "fp8":
            acc, step = k_loop_fp8(
                spec, rings, step, ctx.w1_scale, 0, 0, K, K_GROUP, False, False, PART, layout
            )
        else:
            operand_rows: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 4))
            offset = ctx.w1_offset + expert * (K // 128 * n_rows) + row0 + part0
            offset = offset + gl.arange(0, ROWS, layout=operand_rows)
            acc, step = k_loop_mxfp4(
                spec, rings, step, offset, n_rows, K, K_GROUP, False, PART, layout
            )
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
    part0: gl.constexpr = 0 if spec.tokens_first else PART * ROWS
    if spec.recipe == "bf16":
        acc, step = k_loop_bf16(spec, rings, step, K, PART, layout)
    elif spec.recipe == "fp8_block":
        w_scale = ctx.w2_scale + expert * (K // 128 * n_rows) + row0 + part0
        acc, step = k_loop_fp8(
            spec, rings, step, w_scale, n_rows, 0, K, H_GROUP, True, True, PART, layout
        )
    else:
        if spec.recipe == "fp8":
            acc, step = k_loop_fp8(
                spec, rings, step, ctx.w2_scale, 0, 0, K, H_GROUP, False, True, PART, layout
            )
        else:
            operand_rows: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 4))
            offset = ctx.w2_offset + expert * (K // 128 * n_rows) + row0 + part0
            offset = offset + gl.arange(0, ROWS, layout=operand_rows)
            acc, step = k_loop_mxfp4(
                spec, rings, step, offset, n_rows, K, H_GROUP, True, PART, layout
            )
        acc = acc * gl.load(
            ctx.w2_scale + expert * n_rows + row0 + along_weights(spec, layout, PART)
        )
    return acc, step


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
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        begin = now(ctx)
        if kind == LINEAR1:
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
        record(ctx, PART, i, kind, block, tile, begin, middle, now(ctx))
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
    if spec.phases == "fused":
        combine_role(ctx, PART + 1, spec.math_partitions + 1, PART, i)
