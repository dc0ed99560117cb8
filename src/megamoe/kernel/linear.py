"""The matrix products: K loops of each recipe and what happens to a finished tile.

Weights are the M side of WGMMA and tokens the N side, in both tile families, so that a thread holds gate and up of
the same column (weight rows are interleaved by 8) and MXFP4 codes can be expanded straight into the A operand.
All recipes walk K upwards and promote at the same places in every tile family: a row's bits do not depend on the tile.
"""

from megamoe.kernel.activation import power_of_two_scale, swiglu
from megamoe.kernel.compat import cta_barrier, gl, gluon, mbarrier, warpgroup_mma, warpgroup_mma_wait
from megamoe.kernel.context import TASK_SLOTS
from megamoe.kernel.schedule import DONE, LINEAR1, release_task, take_task
from megamoe.kernel.signal import origin_of
from megamoe.kernel.sync import every_thread, fence_async_proxy
from megamoe.kernel.trace import now, record

ROWS = gl.constexpr(64)  # weight rows of one math partition
H_GROUP = gl.constexpr(64)  # intermediate columns under one scale
K_GROUP = gl.constexpr(128)  # K between two promotions where no scale asks for more

# Four 4-bit codes of k and four of k + 32 in a word -> two registers of e4m3.  A code of magnitude v becomes
# v * 2^(d - 4): two byte permutes look it up in a table of eight, built from the offset d of its (row, 32) block.
_EXPAND = """
{
.reg .b32 sel, sel2, l0, l1, h0, h1, ra, rb, sb;
mad.lo.u32 l0, $3, 0x08080800, 0x1c181000;
mad.lo.u32 l1, $3, 0x08080808, 0x2c282420;
mad.lo.u32 h0, $7, 0x08080800, 0x1c181000;
mad.lo.u32 h1, $7, 0x08080808, 0x2c282420;
and.b32 sel, $2, 0x77777777;
shr.u32 sel2, sel, 16;
prmt.b32 ra, l0, l1, sel;
prmt.b32 rb, h0, h1, sel2;
shl.b32 sb, $2, 4;
lop3.b32 $0, $2, 0x80808080, ra, 0xEA;
lop3.b32 $1, sb, 0x80808080, rb, 0xEA;
}
"""
EXPAND = gl.constexpr(_EXPAND)


@gluon.jit
def expand_codes(codes, low_offset, high_offset):
    """int8 [rows, 32] words of eight e2m1 codes, int32 [rows, 32] offsets -> two e4m3 [rows, 32] of adjacent K."""
    low, high = gl.inline_asm_elementwise(EXPAND, "=r,=r,r,r,r,r,r,r,r,r,r", [codes, low_offset, high_offset],
                                          dtype=(gl.float8e4nv, gl.float8e4nv), is_pure=True, pack=4)  # fmt: skip
    return low, high


@gluon.jit
def take_stage(rings, step, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(rings.full.index(stage), (step // STAGES) & 1)
    return stage


@gluon.jit
def k_loop_bf16(spec: gl.constexpr, rings, step, K: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr):
    """One fp32 accumulator over all of K; the product of a step runs while the next stage arrives."""
    BLOCK_M: gl.constexpr = spec.block_m
    acc = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
    for k in range(K // spec.block_k):
        stage = take_stage(rings, step, spec.stages)
        w = rings.w.index(stage).slice(PART * ROWS, ROWS, 0)
        x = rings.x.index(stage).permute((1, 0))
        acc = warpgroup_mma(w, x, acc, is_async=True)
        acc = warpgroup_mma_wait(1, deps=[acc])
        if k > 0:
            mbarrier.arrive(rings.empty.index((step - 1) % spec.stages), count=1)
        step += 1
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(rings.empty.index((step - 1) % spec.stages), count=1)
    return acc, step


@gluon.jit
def k_loop_fp8(spec: gl.constexpr, rings, step, w_scale, w_stride: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
               W_SCALED: gl.constexpr, X_SCALED: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """Promoted to fp32 every GROUP of K, where the scales of the group are applied if it has any.

    `w_scale` points to [K / 128, rows] with `w_stride` between groups; scales of x come with the stage.
    """
    BLOCK_M: gl.constexpr = spec.block_m
    steps: gl.constexpr = K // spec.block_k
    acc = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
    if W_SCALED:
        next_scale = gl.load(w_scale)
    for k in range(steps):
        if W_SCALED:
            scale_w = next_scale[:, None]
            # one step ahead, so that the load does not stall the next one
            next_scale = gl.load(w_scale + gl.minimum(k + 1, steps - 1) * w_stride)
        stage = take_stage(rings, step, spec.stages)
        w = rings.w.index(stage).slice(PART * ROWS, ROWS, 0)
        x = rings.x.index(stage).permute((1, 0))
        for g in gl.static_range(spec.block_k // GROUP):
            part = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
            part = warpgroup_mma(w.slice(g * GROUP, GROUP, 1), x.slice(g * GROUP, GROUP, 0), part, is_async=True)
            if X_SCALED:
                scale = rings.x_scale.index(stage).slice(g, 1, 0).load(layout)
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
    low, high = expand_codes(codes, ((low_offsets >> (8 * J)) & 0xFF)[:, None] + zero,
                             ((high_offsets >> (8 * J)) & 0xFF)[:, None] + zero)  # fmt: skip
    part = warpgroup_mma(low, x.slice(64 * J, 32, 0), part, is_async=True)
    return warpgroup_mma(high, x.slice(64 * J + 32, 32, 0), part, is_async=True)


@gluon.jit
def k_loop_mxfp4(spec: gl.constexpr, rings, step, offset, n_rows: gl.constexpr, K: gl.constexpr, GROUP: gl.constexpr,
                 X_SCALED: gl.constexpr, PART: gl.constexpr, layout: gl.constexpr):  # fmt: skip
    """As :func:`k_loop_fp8`, the weights expanded from 4-bit codes in registers.

    `offset` points to two words a row and 256 of K: byte j belongs to k = 64 j .. + 31 and 64 j + 32 .. + 63.
    """
    BLOCK_M: gl.constexpr = spec.block_m
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 4)
    steps: gl.constexpr = K // spec.block_k
    slices: gl.constexpr = GROUP // 64
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
        for g in gl.static_range(spec.block_k // GROUP):
            part = gl.zeros((ROWS, BLOCK_M), gl.float32, layout)
            for s in gl.static_range(slices):
                part = mma_slice(w, x, low_offsets, high_offsets, part, g * slices + s, operand)
            part = warpgroup_mma_wait(0, deps=[part])
            if X_SCALED:
                scale = rings.x_scale.index(stage).slice(g, 1, 0).load(layout)
            if g == spec.block_k // GROUP - 1:
                mbarrier.arrive(rings.empty.index(stage), count=1)
            if X_SCALED:
                acc += part * scale
            else:
                acc += part
            if BLOCK_M >= 64:
                # else the assembler starts the next group early and spills: two parts do not fit in registers
                cta_barrier()
        low_offsets = next_low
        high_offsets = next_high
        step += 1
    return acc, step


@gluon.jit
def linear1(ctx, rings, step, block, tile, expert, valid, PART: gl.constexpr, layout: gl.constexpr):
    """The L1 accumulator of one partition, all scales applied: fp32 [ROWS, block_m]."""
    spec: gl.constexpr = ctx.spec
    K: gl.constexpr = spec.padded_hidden
    n_rows: gl.constexpr = 2 * spec.padded_intermediate
    row0 = tile * spec.block_n + PART * ROWS
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if spec.recipe == "bf16":
        acc, step = k_loop_bf16(spec, rings, step, K, PART, layout)
    elif spec.recipe == "fp8_block":
        w_scale = ctx.w1_scale + expert * (K // 128 * n_rows) + rows
        acc, step = k_loop_fp8(spec, rings, step, w_scale, n_rows, K, K_GROUP, True, True, PART, layout)
    else:
        if spec.recipe == "fp8":
            acc, step = k_loop_fp8(spec, rings, step, ctx.w1_scale, 0, K, K_GROUP, False, False, PART, layout)
        else:
            operand_rows: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 4))
            offset = ctx.w1_offset + expert * (K // 128 * n_rows) + row0 + gl.arange(0, ROWS, layout=operand_rows)
            acc, step = k_loop_mxfp4(spec, rings, step, offset, n_rows, K, K_GROUP, False, PART, layout)
        tokens = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, layout))
        pool_scale = ctx.region(spec.offset.pool_x_scale, gl.float32) + (block % spec.ring_blocks) * spec.block_m
        x_scale = gl.load(pool_scale + tokens, mask=tokens < valid, other=0.0, cache_modifier=".cg")
        acc = acc * gl.load(ctx.w1_scale + expert * n_rows + rows)[:, None] * x_scale[None, :]
    return acc, step


@gluon.jit
def linear2(ctx, rings, step, tile, expert, PART: gl.constexpr, layout: gl.constexpr):
    """The L2 accumulator of one partition, all scales applied: fp32 [ROWS, block_m]."""
    spec: gl.constexpr = ctx.spec
    K: gl.constexpr = spec.padded_intermediate
    n_rows: gl.constexpr = spec.padded_hidden
    row0 = tile * spec.block_n + PART * ROWS
    rows = row0 + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    if spec.recipe == "bf16":
        acc, step = k_loop_bf16(spec, rings, step, K, PART, layout)
    elif spec.recipe == "fp8_block":
        w_scale = ctx.w2_scale + expert * (K // 128 * n_rows) + rows
        acc, step = k_loop_fp8(spec, rings, step, w_scale, n_rows, K, H_GROUP, True, True, PART, layout)
    else:
        if spec.recipe == "fp8":
            acc, step = k_loop_fp8(spec, rings, step, ctx.w2_scale, 0, K, H_GROUP, False, True, PART, layout)
        else:
            operand_rows: gl.constexpr = gl.SliceLayout(1, gl.DotOperandLayout(0, layout, 4))
            offset = ctx.w2_offset + expert * (K // 128 * n_rows) + row0 + gl.arange(0, ROWS, layout=operand_rows)
            acc, step = k_loop_mxfp4(spec, rings, step, offset, n_rows, K, H_GROUP, True, PART, layout)
        acc = acc * gl.load(ctx.w2_scale + expert * n_rows + rows)[:, None]
    return acc, step


@gluon.jit
def activate(ctx, rings, acc, count, block, tile, valid, PART: gl.constexpr):
    """SwiGLU of one partition's tile, quantised under a scale shared with its neighbour, stored to the pool."""
    spec: gl.constexpr = ctx.spec
    warps: gl.constexpr = gl.num_warps()
    columns: gl.constexpr = ROWS // 2
    BLOCK_M: gl.constexpr = spec.block_m
    pairs = acc.reshape((ROWS // 16, 2, 8, BLOCK_M)).permute((0, 2, 3, 1))
    gate, up = pairs.split()
    gate = gate.reshape((columns, BLOCK_M))
    up = up.reshape((columns, BLOCK_M))
    layout: gl.constexpr = gate.type.layout
    slot = (block % spec.ring_blocks) * spec.block_m
    tokens = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, layout))
    weight = gl.load(ctx.region(spec.offset.pool_weight, gl.float32) + slot + tokens, mask=tokens < valid, other=0.0,
                     cache_modifier=".cg")  # fmt: skip
    out = swiglu(gate, up, weight[None, :], spec.clamp)
    if spec.recipe == "bf16":
        stored = out.to(gl.bfloat16)
        vector: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, warps], [0, 1])
        pool = ctx.region(spec.offset.pool_h, gl.bfloat16)
    else:
        group: gl.constexpr = PART // 2
        mine = gl.max(gl.maximum(out, -out), 0)
        half = (count & 1) * spec.math_partitions  # the neighbour may still read the other half
        rings.amax.index(half + PART).store(mine)
        cta_barrier()
        mbarrier.arrive(rings.amax_full.index(group), count=1)
        mbarrier.wait(rings.amax_full.index(group), count & 1)
        other = rings.amax.index(half + (PART ^ 1)).load(gl.SliceLayout(0, layout))
        scale, inverse = power_of_two_scale(gl.maximum(mine, other))
        stored = (out * inverse[None, :]).to(gl.float8e4nv)
        vector: gl.constexpr = gl.BlockedLayout([16, 1], [2, 16], [1, warps], [0, 1])
        pool = ctx.region(spec.offset.pool_h, gl.float8e4nv)
        if PART % 2 == 0:
            row = tile * (spec.block_n // 2 // H_GROUP) + group
            scales = ctx.region(spec.offset.pool_h_scale, gl.float32)
            gl.store(scales + row * spec.ring_rows + slot + tokens, scale, mask=tokens < valid)
    stored = gl.convert_layout(stored, vector)
    column = tile * (spec.block_n // 2) + PART * columns + gl.arange(0, columns, layout=gl.SliceLayout(1, vector))
    token = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, vector))
    target = pool + (slot + token).to(gl.int64)[None, :] * spec.padded_intermediate + column[:, None]
    gl.store(target, stored, mask=(token < valid)[None, :])
    # L2's loaders read this through TMA
    fence_async_proxy(every_thread())


@gluon.jit
def store_accumulator(ctx, acc, block, tile, valid, PART: gl.constexpr, layout: gl.constexpr):
    """Chain only: keep the L1 accumulator for the activation's own launch."""
    spec: gl.constexpr = ctx.spec
    rows = tile * spec.block_n + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    tokens = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, layout))
    pool_row = (block * spec.block_m + tokens).to(gl.int64)[None, :]
    target = ctx.region(spec.offset.l1_acc, gl.float32) + pool_row * (2 * spec.padded_intermediate) + rows[:, None]
    gl.store(target, acc, mask=(tokens < valid)[None, :])


@gluon.jit
def push(ctx, acc, block, tile, valid, PART: gl.constexpr):
    """Round one partition's L2 tile to bf16 and write it to the ranks its tokens came from."""
    spec: gl.constexpr = ctx.spec
    warps: gl.constexpr = gl.num_warps()
    vector: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, warps], [0, 1])
    partial = gl.convert_layout(acc.to(gl.bfloat16), vector)
    token = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, vector))
    real = token < valid
    slot = (block % spec.ring_blocks) * spec.block_m
    origin = gl.load(ctx.region(spec.offset.pool_origin, gl.int64) + slot + token, mask=real, other=0,
                     cache_modifier=".cg")  # fmt: skip
    source, entry, real = origin_of(spec, origin, real)
    row = ctx.peer_region(source, spec.offset.partials, gl.bfloat16) + entry.to(gl.int64) * spec.padded_hidden
    row = gl.multiple_of(row, 16)
    column = tile * spec.block_n + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, vector))
    gl.store(row[None, :] + column[:, None], partial, mask=real[None, :])


@gluon.jit
def math_role(ctx, rings, PART: gl.constexpr):
    """One warpgroup of four warps: 64 weight rows of every tile of this CTA."""
    spec: gl.constexpr = ctx.spec
    BLOCK_M: gl.constexpr = spec.block_m
    k_instruction: gl.constexpr = 32 // spec.x_bytes
    layout: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1],
                                                     instr_shape=[16, BLOCK_M, k_instruction])  # fmt: skip
    step = 0
    i = 0
    l1_count = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        begin = now(ctx)
        if kind == LINEAR1:
            acc, step = linear1(ctx, rings, step, block, tile, expert, valid, PART, layout)
            middle = now(ctx)
            if spec.phases == "fused":
                activate(ctx, rings, acc, l1_count, block, tile, valid, PART)
            else:
                store_accumulator(ctx, acc, block, tile, valid, PART, layout)
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
