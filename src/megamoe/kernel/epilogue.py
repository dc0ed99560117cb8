"""What happens to a finished tile: L1's is activated, quantised and stored to the pool, L2's is
pushed to its owners.
"""

from megamoe import plan
from megamoe.kernel.activation import power_of_two_scale, swiglu
from megamoe.kernel.compat import cta_barrier, gl, gluon, mbarrier
from megamoe.kernel.context import MATH_PARTITIONS
from megamoe.kernel.signal import origin_of
from megamoe.kernel.sync import every_thread, fence_async_proxy

ROWS = gl.constexpr(64)  # M side of one math partition: weight rows or tokens
H_GROUP = gl.constexpr(plan.H_GROUP)  # intermediate columns under one scale


@gluon.jit
def along_weights(spec: gl.constexpr, layout: gl.constexpr, PART: gl.constexpr):
    """Offsets of an accumulator's weight rows within the tile, shaped to broadcast over it."""
    if spec.tokens_first:
        return gl.arange(0, spec.block_n, layout=gl.SliceLayout(0, layout))[None, :]
    else:
        return PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def along_tokens(spec: gl.constexpr, layout: gl.constexpr, PART: gl.constexpr):
    """Offsets of an accumulator's tokens within the block, shaped to broadcast over it."""
    if spec.tokens_first:
        return PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))[:, None]
    else:
        return gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, layout))[None, :]


@gluon.jit
def activate_tokens_first(ctx, acc, block, tile, valid, PART: gl.constexpr):
    """fp32 [64 tokens, 128 weight rows] -> 64 columns of L1's output, which is one scale group of
    each token.
    """
    spec: gl.constexpr = ctx.spec
    warps: gl.constexpr = gl.num_warps()
    pairs = acc.reshape((ROWS, 8, 2, 8)).permute((0, 1, 3, 2))
    gate, up = pairs.split()
    gate = gate.reshape((ROWS, H_GROUP))
    up = up.reshape((ROWS, H_GROUP))
    layout: gl.constexpr = gate.type.layout
    slot = (block % spec.ring_blocks) * spec.block_m
    token = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    real = token < valid
    weight = gl.load(
        ctx.region(spec.offset.pool_weight, gl.float32) + slot + token,
        mask=real,
        other=0.0,
        cache_modifier=".cg",
    )
    out = swiglu(gate, up, weight[:, None], spec.clamp)
    if spec.recipe == "bf16":
        stored = out.to(gl.bfloat16)
        vector: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
        pool = ctx.region(spec.offset.pool_h, gl.bfloat16)
    else:
        scale, inverse = power_of_two_scale(gl.max(gl.maximum(out, -out), 1))
        scales = ctx.region(spec.offset.pool_h_scale, gl.float32) + tile * spec.ring_rows + slot
        gl.store(scales + token, scale, mask=real)
        stored = (out * inverse[:, None]).to(gl.float8e4nv)
        vector: gl.constexpr = gl.BlockedLayout([1, 16], [8, 4], [warps, 1], [1, 0])
        pool = ctx.region(spec.offset.pool_h, gl.float8e4nv)
    stored = gl.convert_layout(stored, vector)
    row = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, vector))
    column = tile * H_GROUP + gl.arange(0, H_GROUP, layout=gl.SliceLayout(0, vector))
    target = pool + (slot + row).to(gl.int64)[:, None] * spec.padded_intermediate + column[None, :]
    gl.store(target, stored, mask=(row < valid)[:, None])
    # L2's loaders read this through TMA
    fence_async_proxy(every_thread())


@gluon.jit
def activate_weights_first(ctx, rings, acc, count, block, tile, valid, PART: gl.constexpr):
    """fp32 [64 weight rows, tokens] -> 32 columns of L1's output; the other half of their scale
    group is a neighbour's.

    `count` numbers the L1 tiles of this CTA.
    """
    spec: gl.constexpr = ctx.spec
    warps: gl.constexpr = gl.num_warps()
    COLUMNS: gl.constexpr = ROWS // 2
    BLOCK_M: gl.constexpr = spec.block_m
    pairs = acc.reshape((ROWS // 16, 2, 8, BLOCK_M)).permute((0, 2, 3, 1))
    gate, up = pairs.split()
    gate = gate.reshape((COLUMNS, BLOCK_M))
    up = up.reshape((COLUMNS, BLOCK_M))
    layout: gl.constexpr = gate.type.layout
    slot = (block % spec.ring_blocks) * spec.block_m
    tokens = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, layout))
    weight = gl.load(
        ctx.region(spec.offset.pool_weight, gl.float32) + slot + tokens,
        mask=tokens < valid,
        other=0.0,
        cache_modifier=".cg",
    )
    out = swiglu(gate, up, weight[None, :], spec.clamp)
    if spec.recipe == "bf16":
        stored = out.to(gl.bfloat16)
        vector: gl.constexpr = gl.BlockedLayout([8, 1], [4, 8], [1, warps], [0, 1])
        pool = ctx.region(spec.offset.pool_h, gl.bfloat16)
    else:
        mine = gl.max(gl.maximum(out, -out), 0)
        half = (count & 1) * MATH_PARTITIONS  # the neighbour may still read the other half
        rings.amax.index(half + PART).store(mine)
        cta_barrier()
        mbarrier.arrive(rings.amax_full.index(0), count=1)
        mbarrier.wait(rings.amax_full.index(0), count & 1)
        other = rings.amax.index(half + 1 - PART).load(gl.SliceLayout(0, layout))
        scale, inverse = power_of_two_scale(gl.maximum(mine, other))
        stored = (out * inverse[None, :]).to(gl.float8e4nv)
        vector: gl.constexpr = gl.BlockedLayout([16, 1], [2, 16], [1, warps], [0, 1])
        pool = ctx.region(spec.offset.pool_h, gl.float8e4nv)
        if PART == 0:
            scales = ctx.region(spec.offset.pool_h_scale, gl.float32)
            gl.store(scales + tile * spec.ring_rows + slot + tokens, scale, mask=tokens < valid)
    stored = gl.convert_layout(stored, vector)
    column = (
        tile * (spec.block_n // 2)
        + PART * COLUMNS
        + gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, vector))
    )
    token = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, vector))
    target = (
        pool + (slot + token).to(gl.int64)[None, :] * spec.padded_intermediate + column[:, None]
    )
    gl.store(target, stored, mask=(token < valid)[None, :])
    # L2's loaders read this through TMA
    fence_async_proxy(every_thread())


@gluon.jit
def store_accumulator(ctx, acc, block, tile, valid, PART: gl.constexpr, layout: gl.constexpr):
    """Chain only: keep the L1 accumulator for the activation's own launch."""
    spec: gl.constexpr = ctx.spec
    weight_row = along_weights(spec, layout, PART)
    token = along_tokens(spec, layout, PART)
    pool_row = (block * spec.block_m + token).to(gl.int64)
    target = ctx.region(spec.offset.l1_acc, gl.float32) + pool_row * (2 * spec.padded_intermediate)
    gl.store(target + (tile * spec.block_n + weight_row), acc, mask=token < valid)


@gluon.jit
def push(ctx, acc, block, tile, valid, PART: gl.constexpr):
    """Round one partition's L2 tile to bf16 and write it to the ranks its tokens came from."""
    spec: gl.constexpr = ctx.spec
    warps: gl.constexpr = gl.num_warps()
    if spec.tokens_first:
        vector: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
        lines: gl.constexpr = gl.SliceLayout(1, vector)
        token = PART * ROWS + gl.arange(0, ROWS, layout=lines)
        column = (
            tile * spec.block_n + gl.arange(0, spec.block_n, layout=gl.SliceLayout(0, vector))
        )[None, :]
    else:
        vector: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, warps], [0, 1])
        lines: gl.constexpr = gl.SliceLayout(0, vector)
        token = gl.arange(0, spec.block_m, layout=lines)
        column = (
            tile * spec.block_n + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, vector))
        )
        column = column[:, None]
    partial = gl.convert_layout(acc.to(gl.bfloat16), vector)
    real = token < valid
    slot = (block % spec.ring_blocks) * spec.block_m
    origin = gl.load(
        ctx.region(spec.offset.pool_origin, gl.int64) + slot + token,
        mask=real,
        other=0,
        cache_modifier=".cg",
    )
    source, entry, real = origin_of(spec, origin, real)
    row = (
        ctx.peer_region(source, spec.offset.partials, gl.bfloat16)
        + entry.to(gl.int64) * spec.padded_hidden
    )
    row = gl.multiple_of(row, 16)
    if spec.tokens_first:
        gl.store(row[:, None] + column, partial, mask=real[:, None])
    else:
        gl.store(row[None, :] + column, partial, mask=real[None, :])
