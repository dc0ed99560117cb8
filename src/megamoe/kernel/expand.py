"""The expanders: warpgroups that turn the 4-bit codes of MXFP4 into e4m3, stage by stage.

Codes land in a ring of their own (`packed`); an expander writes what they stand for where the
weight loader of the other recipes would have put it.  So the products are those of FP8, a code is
expanded once for all tokens of a block, and math never waits for an expansion that it could have
had before.
"""

from megamoe.kernel.compat import (
    cta_barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)
from megamoe.kernel.schedule import DONE, LINEAR1, release_task, take_task
from megamoe.kernel.trace import EXPAND, now, record

ROWS = gl.constexpr(128)  # of a stage at a time: one a thread

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
EXPAND_WORD = gl.constexpr("""
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
    """int8 [.., 32], words of eight e2m1 codes, and int32 tables -> two e4m3 [.., 32] of adjacent
    K.
    """
    return gl.inline_asm_elementwise(
        EXPAND_WORD,
        "=&r,=&r" + ",r" * 17,
        [codes, low0, low1, high0, high1],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def expand_rows(codes, offsets, more, WIDTH: gl.constexpr):
    """int8 [128, WIDTH] codes of 2 * WIDTH of K -> e4m3 [128, 2 * WIDTH].

    offsets, more: int32 [128], each the offsets of four blocks, 128 of K; `more` is used where
    WIDTH is 128.
    """
    PARTS: gl.constexpr = WIDTH // 32
    codes = codes.reshape((ROWS, PARTS, 32))
    layout: gl.constexpr = codes.type.layout
    parts: gl.constexpr = gl.SliceLayout(2, layout)
    part = gl.arange(0, PARTS, layout=gl.SliceLayout(0, parts))[None, :]
    word = gl.convert_layout(offsets, gl.SliceLayout(1, parts))[:, None]
    if PARTS > 2:
        more = gl.convert_layout(more, gl.SliceLayout(1, parts))[:, None]
        word = gl.where(part < 2, word, more)
    shift = 16 * (part % 2)
    low0, low1, high0, high1 = code_tables((word >> shift) & 0xFF, (word >> (shift + 8)) & 0xFF)
    zero = gl.zeros((ROWS, PARTS, 32), gl.int32, layout)
    low, high = expand_codes(
        codes,
        low0[:, :, None] + zero,
        low1[:, :, None] + zero,
        high0[:, :, None] + zero,
        high1[:, :, None] + zero,
    )
    return gl.join(low, high).permute((0, 1, 3, 2)).reshape((ROWS, 2 * WIDTH))


@gluon.jit
def expand_stage(rings, source, stage, spec: gl.constexpr):
    """A landed stage: from codes to operands, with four warps 128 of K at a time, with eight all
    of a stage.
    """
    warps: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = spec.factor_rows
    TURNS: gl.constexpr = BLOCKS if warps == 4 else 1
    WIDTH: gl.constexpr = 64 * BLOCKS // TURNS
    by_row: gl.constexpr = gl.BlockedLayout(
        [1, 4 * WIDTH // warps], [32, 1], [4, warps // 4], [1, 0]
    )
    line: gl.constexpr = gl.SliceLayout(1, by_row)
    # a plain view, one row of offsets for each 128 of K of each stage
    VIEW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    STAGES: gl.constexpr = spec.packed_stages
    plain = reinterpret(rings.factors, gl.int32, [STAGES * BLOCKS, ROWS], VIEW)
    codes = rings.packed.index(source)
    w = rings.w.index(stage)
    for turn in gl.static_range(TURNS):
        offsets = plain.index(source * BLOCKS + turn).load(line)
        more = offsets
        if WIDTH == 128:
            more = plain.index(source * BLOCKS + 1).load(line)
        mine = codes.slice(WIDTH * turn, WIDTH, 1).load(by_row)
        w.slice(2 * WIDTH * turn, 2 * WIDTH, 1).store(expand_rows(mine, offsets, more, WIDTH))


@gluon.jit
def expand_tile(rings, step, steps, WHICH: gl.constexpr, spec: gl.constexpr):
    """This expander's share of a tile of `steps` stages: 256 of K in turn, so that the way through
    the barriers is paid once for both halves.
    """
    TURN: gl.constexpr = 2 // spec.factor_rows
    for k in range(WHICH * TURN, steps, spec.expanders * TURN):
        for t in gl.static_range(TURN):
            s = step + k + t
            mbarrier.wait(
                rings.packed_full.index(s % spec.packed_stages), (s // spec.packed_stages) & 1
            )
            mbarrier.wait(rings.empty.index(s % spec.stages), ((s // spec.stages) & 1) ^ 1)
            expand_stage(rings, s % spec.packed_stages, s % spec.stages, spec)
        fence_async_shared()
        cta_barrier()
        for t in gl.static_range(TURN):
            s = step + k + t
            mbarrier.arrive(rings.full.index(s % spec.stages), count=1)
            mbarrier.arrive(rings.packed_empty.index(s % spec.packed_stages), count=1)
    return step + steps


@gluon.jit
def expand_role(ctx, rings, WHICH: gl.constexpr):
    """Four or eight warps; one of `spec.expanders` that take stages in turn."""
    spec: gl.constexpr = ctx.spec
    steps1: gl.constexpr = spec.padded_hidden // spec.block_k
    steps2: gl.constexpr = spec.padded_intermediate // spec.block_k
    step = 0
    i = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        begin = now(ctx)
        step = expand_tile(rings, step, gl.where(kind == LINEAR1, steps1, steps2), WHICH, spec)
        record(ctx, EXPAND + WHICH, i, kind, block, tile, begin, begin, now(ctx))
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
