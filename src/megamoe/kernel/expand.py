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
def expand_rows(codes, offsets):
    """int8 [128, 64] codes of 128 of K and int32 [128] offsets of its four blocks -> e4m3
    [128, 128].
    """
    codes = codes.reshape((ROWS, 2, 32))
    layout: gl.constexpr = codes.type.layout
    halves: gl.constexpr = gl.SliceLayout(2, layout)
    offsets = gl.convert_layout(offsets, gl.SliceLayout(1, halves))[:, None]
    shift = (16 * gl.arange(0, 2, layout=gl.SliceLayout(0, halves)))[None, :]
    low0, low1, high0, high1 = code_tables(
        (offsets >> shift) & 0xFF, (offsets >> (shift + 8)) & 0xFF
    )
    zero = gl.zeros((ROWS, 2, 32), gl.int32, layout)
    low, high = expand_codes(
        codes,
        low0[:, :, None] + zero,
        low1[:, :, None] + zero,
        high0[:, :, None] + zero,
        high1[:, :, None] + zero,
    )
    return gl.join(low, high).permute((0, 1, 3, 2)).reshape((ROWS, 128))


@gluon.jit
def expand_block(rings, source, stage, BLOCK: gl.constexpr, spec: gl.constexpr):
    """128 of K of a landed stage: from codes to operands."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [gl.num_warps(), 1], [1, 0])
    # a plain view, one row of offsets for each 128 of K of each stage
    VIEW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    BLOCKS: gl.constexpr = spec.factor_rows
    STAGES: gl.constexpr = spec.packed_stages
    plain = reinterpret(rings.factors, gl.int32, [STAGES * BLOCKS, ROWS], VIEW)
    offsets = plain.index(source * BLOCKS + BLOCK).load(gl.SliceLayout(1, by_row))
    codes = rings.packed.index(source)
    w = rings.w.index(stage)
    if BLOCKS > 1:
        codes = codes.slice(64 * BLOCK, 64, 1)
        w = w.slice(128 * BLOCK, 128, 1)
    w.store(expand_rows(codes.load(by_row), offsets))


@gluon.jit
def expand_tile(rings, step, STEPS: gl.constexpr, WHICH: gl.constexpr, spec: gl.constexpr):
    """This expander's share of a tile's stages: 256 of K in turn, so that the way through the
    barriers is paid once for both halves.
    """
    BLOCKS: gl.constexpr = spec.factor_rows
    TURN: gl.constexpr = 2 // BLOCKS
    for k in range(WHICH * TURN, STEPS, spec.expanders * TURN):
        for t in gl.static_range(TURN):
            s = step + k + t
            mbarrier.wait(
                rings.packed_full.index(s % spec.packed_stages), (s // spec.packed_stages) & 1
            )
            mbarrier.wait(rings.empty.index(s % spec.stages), ((s // spec.stages) & 1) ^ 1)
            for block in gl.static_range(BLOCKS):
                expand_block(rings, s % spec.packed_stages, s % spec.stages, block, spec)
        fence_async_shared()
        cta_barrier()
        for t in gl.static_range(TURN):
            s = step + k + t
            mbarrier.arrive(rings.full.index(s % spec.stages), count=1)
            mbarrier.arrive(rings.packed_empty.index(s % spec.packed_stages), count=1)
    return step + STEPS


@gluon.jit
def expand_role(ctx, rings, WHICH: gl.constexpr):
    """Four warps; one of `spec.expanders` that take stages in turn."""
    spec: gl.constexpr = ctx.spec
    steps1: gl.constexpr = spec.padded_hidden // spec.block_k
    steps2: gl.constexpr = spec.padded_intermediate // spec.block_k
    step = 0
    i = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        begin = now(ctx)
        if kind == LINEAR1:
            step = expand_tile(rings, step, steps1, WHICH, spec)
        else:
            step = expand_tile(rings, step, steps2, WHICH, spec)
        record(ctx, EXPAND + WHICH, i, kind, block, tile, begin, begin, now(ctx))
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
