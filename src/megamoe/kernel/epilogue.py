"""What happens to a finished tile: L1's is activated, quantised and stored to the pool, L2's is
pushed to its owners.
"""

from megamoe import plan
from megamoe.kernel.activation import power_of_two_scale, swiglu
from megamoe.kernel.compat import cta_barrier, gl, gluon, mbarrier
from megamoe.kernel.context import MATH_PARTITIONS
from megamoe.kernel.signal import origin_of

ROWS = gl.constexpr(plan.PART_ROWS)
HALF_N = gl.constexpr(plan.HALF_N)
L1_ROWS = gl.constexpr(plan.L1_ROWS)
H_GROUP = gl.constexpr(plan.H_GROUP)  # intermediate columns under one scale


@gluon.jit
def along_weights(spec: gl.constexpr, layout: gl.constexpr, PART: gl.constexpr):
    """Offsets of an accumulator's weight rows from its first, shaped to broadcast over it."""
    if spec.tokens_first:
        return gl.arange(0, HALF_N, layout=gl.SliceLayout(0, layout))[None, :]
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
def gate_and_up(spec: gl.constexpr, acc):
    """An accumulator of L1, gate and up interleaved by 8 -> the two, each [64 tokens, 64] with
    tokens first, else [32, tokens].
    """
    if spec.tokens_first:
        pairs = acc.reshape((ROWS, HALF_N // 16, 2, 8)).permute((0, 1, 3, 2))
        gate, up = pairs.split()
        return gate.reshape((ROWS, HALF_N // 2)), up.reshape((ROWS, HALF_N // 2))
    else:
        BLOCK_M: gl.constexpr = spec.block_m
        pairs = acc.reshape((ROWS // 16, 2, 8, BLOCK_M)).permute((0, 2, 3, 1))
        gate, up = pairs.split()
        return gate.reshape((ROWS // 2, BLOCK_M)), up.reshape((ROWS // 2, BLOCK_M))


@gluon.jit
def router_weights(ctx, block, valid, PART: gl.constexpr, layout: gl.constexpr):
    """Of a block's tokens, to broadcast over L1's output, whose accumulators are in `layout`."""
    spec: gl.constexpr = ctx.spec
    COLUMNS: gl.constexpr = spec.tile_columns
    like, _ = gate_and_up(spec, gl.zeros((ROWS, COLUMNS), gl.float32, layout))
    out: gl.constexpr = like.type.layout
    weights = ctx.region(spec.offset.pool_weight, gl.float32)
    weights += (block % spec.ring_blocks) * spec.block_m
    token = along_tokens(spec, out, PART)
    return gl.load(weights + token, mask=token < valid, other=0.0, cache_modifier=".cg")


@gluon.jit
def activate(spec: gl.constexpr, acc, weight):
    """An accumulator of L1 -> fp32 columns of its output, half as many."""
    gate, up = gate_and_up(spec, acc)
    return swiglu(gate, up, weight, spec.clamp)


@gluon.jit
def store_activated(ctx, rings, low, high, count, block, tile, valid, PART: gl.constexpr):
    """Quantise and store what a partition has of an L1 tile's 128 columns, as :func:`activate` gave
    it for the first 64 and for the others.  L2's loaders read it through TMA: the signal warp has
    the fence, which here would be waited for before the next tile.

    `count` numbers the L1 tiles of this CTA.
    """
    spec: gl.constexpr = ctx.spec
    if spec.recipe == "bf16":
        low = low.to(gl.bfloat16)
        high = high.to(gl.bfloat16)
    else:
        biggest = gl.maximum(gl.maximum(low, -low), gl.maximum(high, -high))
        inverse = scale_of_tile(ctx, rings, biggest, count, block, tile, valid, PART)
        low = (low * inverse).to(gl.float8e4nv)
        high = (high * inverse).to(gl.float8e4nv)
    store_part(ctx, low, block, tile * H_GROUP, valid, PART)
    store_part(ctx, high, block, tile * H_GROUP + H_GROUP // 2, valid, PART)


@gluon.jit
def scale_of_tile(ctx, rings, biggest, count, block, tile, valid, PART: gl.constexpr):
    """Store the scale of each token's 128 columns, `biggest` being magnitudes whose maximum over
    the columns counts; returns its inverse, to broadcast.

    With weights first each partition has a half of the columns: maxima cross through shared memory.
    """
    spec: gl.constexpr = ctx.spec
    slot = (block % spec.ring_blocks) * spec.block_m
    scales = ctx.region(spec.offset.pool_h_scale, gl.float32) + tile * spec.ring_rows + slot
    layout: gl.constexpr = biggest.type.layout
    if spec.tokens_first:
        scale, inverse = power_of_two_scale(gl.max(biggest, 1))
        token = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        gl.store(scales + token, scale, mask=token < valid)
        return inverse[:, None]
    else:
        amax = gl.max(biggest, 0)
        first = (count & 1) * MATH_PARTITIONS  # the neighbour may still read the other two
        rings.amax.index(first + PART).store(amax)
        cta_barrier()
        mbarrier.arrive(rings.amax_full.index(0), count=1)
        mbarrier.wait(rings.amax_full.index(0), count & 1)
        other = rings.amax.index(first + 1 - PART).load(gl.SliceLayout(0, layout))
        scale, inverse = power_of_two_scale(gl.maximum(amax, other))
        if PART == 0:
            token = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, layout))
            gl.store(scales + token, scale, mask=token < valid)
        return inverse[None, :]


@gluon.jit
def store_part(ctx, part, block, column0, valid, PART: gl.constexpr):
    """Store some of L1's output to the pool: with tokens first 64 columns from `column0`, else this
    partition's 32 of those from `column0`.
    """
    spec: gl.constexpr = ctx.spec
    warps: gl.constexpr = gl.num_warps()
    slot = (block % spec.ring_blocks) * spec.block_m
    ELEMENTS: gl.constexpr = 16 // spec.x_bytes  # of a wide store
    pool = ctx.region(spec.offset.pool_h, part.dtype)
    if spec.tokens_first:
        LANES: gl.constexpr = HALF_N // 2 // ELEMENTS
        vector: gl.constexpr = gl.BlockedLayout(
            [1, ELEMENTS], [32 // LANES, LANES], [warps, 1], [1, 0]
        )
        token = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, vector))
        column = column0 + gl.arange(0, HALF_N // 2, layout=gl.SliceLayout(0, vector))
        real = (token < valid)[:, None]
        row = (slot + token).to(gl.int64)[:, None]
        target = pool + row * spec.padded_intermediate + column[None, :]
    else:
        LANES: gl.constexpr = ROWS // 2 // ELEMENTS
        vector: gl.constexpr = gl.BlockedLayout(
            [ELEMENTS, 1], [LANES, 32 // LANES], [1, warps], [0, 1]
        )
        token = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, vector))
        column = column0 + PART * (ROWS // 2)
        column += gl.arange(0, ROWS // 2, layout=gl.SliceLayout(1, vector))
        real = (token < valid)[None, :]
        row = (slot + token).to(gl.int64)[None, :]
        target = pool + row * spec.padded_intermediate + column[:, None]
    gl.store(target, gl.convert_layout(part, vector), mask=real)


@gluon.jit
def store_accumulator(ctx, acc, block, row0, valid, PART: gl.constexpr, layout: gl.constexpr):
    """Chain only: keep the L1 accumulator for the activation's own launch."""
    spec: gl.constexpr = ctx.spec
    weight_row = along_weights(spec, layout, PART)
    token = along_tokens(spec, layout, PART)
    pool_row = (block * spec.block_m + token).to(gl.int64)
    target = ctx.region(spec.offset.l1_acc, gl.float32) + pool_row * (2 * spec.padded_intermediate)
    gl.store(target + (row0 + weight_row), acc, mask=token < valid)


@gluon.jit
def origins(ctx, block, valid, PART: gl.constexpr):
    """Where the block's rows came from, in the layout of :func:`push`, and which are real."""
    spec: gl.constexpr = ctx.spec
    vector: gl.constexpr = push_layout(spec, gl.num_warps())
    if spec.tokens_first:
        token = PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, vector))
    else:
        token = gl.arange(0, spec.block_m, layout=gl.SliceLayout(0, vector))
    slot = (block % spec.ring_blocks) * spec.block_m
    origin = gl.load(
        ctx.region(spec.offset.pool_origin, gl.int64) + slot + token,
        mask=token < valid,
        other=0,
        cache_modifier=".cg",
    )
    return origin, token < valid


@gluon.jit
def owners_rows(ctx, origin, real):
    """Where partials of tokens go, at the ranks they came from: pointers to the rows, and which are
    real.
    """
    spec: gl.constexpr = ctx.spec
    source, entry, real = origin_of(spec, origin, real)
    row = (
        ctx.peer_region(source, spec.offset.partials, gl.bfloat16)
        + entry.to(gl.int64) * spec.padded_hidden
    )
    return gl.multiple_of(row, 16), real


@gluon.jit
def push(ctx, acc, row, real, row0, PART: gl.constexpr):
    """Round one partition's L2 accumulator, of weight rows from `row0`, to bf16 and write it to
    :func:`owners_rows`.
    """
    spec: gl.constexpr = ctx.spec
    vector: gl.constexpr = push_layout(spec, gl.num_warps())
    partial = gl.convert_layout(acc.to(gl.bfloat16), vector)
    if spec.tokens_first:
        column = row0 + gl.arange(0, HALF_N, layout=gl.SliceLayout(0, vector))
        gl.store(row[:, None] + column[None, :], partial, mask=real[:, None])
    else:
        column = row0 + PART * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, vector))
        gl.store(row[None, :] + column[:, None], partial, mask=real[None, :])


@gluon.constexpr_function
def push_layout(spec, warps):
    """16 bytes a thread along the weight rows."""
    if spec.tokens_first:
        return gl.BlockedLayout([1, 8], [2, 16], [warps, 1], [1, 0])
    return gl.BlockedLayout([8, 1], [8, 4], [1, warps], [0, 1])
