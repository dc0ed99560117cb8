"""MXFP4 in long calls: the codes of an expert become e4m3 once, in memory, not once for each block.

Then the tiles are those of FP8.  Dispatch does it between its pulls, expert by expert, in the order
in which the tiles will ask; every program has a share of every expert.
"""

from megamoe.kernel.compat import gl, gluon
from megamoe.kernel.expand import expand_codes
from megamoe.kernel.sync import signal_tile
from megamoe.kernel.trace import COMMUNICATE, UNPACK, now, record

ROWS = gl.constexpr(16)  # weight rows of a step, four a warp


@gluon.jit
def unpacked_of(ctx, expert):
    """Pointer to how many programs have unpacked their share of an expert in this call."""
    counters = ctx.region(ctx.spec.offset.unpacked, gl.int32)
    return counters + ctx.counter_set * (ctx.spec.offset.unpacked_set // 4) + expert


@gluon.jit
def unpack_matrix(
    spec: gl.constexpr, codes, offsets, target, HEIGHT: gl.constexpr, K: gl.constexpr
):
    """This program's share of a matrix of HEIGHT rows, ROWS of them by up to 1024 of K at a time.

    What counts is the number of instructions: codes on their way ahead, in registers or in shared
    memory, took longer than this.
    """
    warps: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = spec.unpack_columns // 64
    PARTS: gl.constexpr = K // 64 // BLOCKS
    layout: gl.constexpr = gl.BlockedLayout([4, 1, 16], [1, 16, 2], [warps, 1, 1], [2, 1, 0])
    tile: gl.constexpr = gl.SliceLayout(2, layout)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, tile))[:, None]
    b = gl.arange(0, BLOCKS, layout=gl.SliceLayout(0, tile))[None, :]
    byte = gl.arange(0, 32, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    for step in range(gl.program_id(0), HEIGHT // ROWS * PARTS, gl.num_programs(0)):
        row = step // PARTS * ROWS + r
        block = step % PARTS * BLOCKS + b
        source = (row * (K // 2) + block * 32)[:, :, None] + byte
        code = gl.load(codes + source)
        offset = gl.load(offsets + (block // 2 * HEIGHT + row)) >> (16 * (block % 2))
        low, high = expand_codes(code, offset[:, :, None])
        place = (row * K + block * 64)[:, :, None] + byte
        gl.store(target + place, low)
        gl.store(target + (place + 32), high)


@gluon.jit
def unpack_expert(ctx, expert, event):
    """This program's share of an expert, L1's matrix first; returns the next free event."""
    spec: gl.constexpr = ctx.spec
    begin = now(ctx)
    HIDDEN: gl.constexpr = spec.padded_hidden
    WIDE: gl.constexpr = spec.padded_intermediate
    SIZE1: gl.constexpr = 2 * WIDE * HIDDEN
    SIZE2: gl.constexpr = HIDDEN * WIDE
    e = expert.to(gl.int64)
    codes = ctx.w1_codes + e * (SIZE1 // 2)
    offsets = ctx.w1_offset + e * (SIZE1 // 128)
    unpack_matrix(spec, codes, offsets, ctx.unpacked + e * SIZE1, 2 * WIDE, HIDDEN)
    codes = ctx.w2_codes + e * (SIZE2 // 2)
    offsets = ctx.w2_offset + e * (SIZE2 // 128)
    target = ctx.unpacked + (e * SIZE2 + spec.experts_per_rank * SIZE1)
    unpack_matrix(spec, codes, offsets, target, HIDDEN, WIDE)
    signal_tile(unpacked_of(ctx, expert))
    record(ctx, COMMUNICATE, event, UNPACK, expert, 0, begin, begin, now(ctx))
    return event + 1
