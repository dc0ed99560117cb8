"""MXFP4: from 4-bit codes to e4m3.

In narrow tiles the math does it, in registers, on the way to WGMMA.  In wide tiles weights are the
side that WGMMA reads from shared memory: codes land in a ring of their own (`packed`), and a
warpgroup, the expander, writes what they stand for where the weight loader of the other recipes
would have put it.
"""

from megamoe import plan
from megamoe.kernel.compat import (
    cta_barrier,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    reinterpret,
)
from megamoe.kernel.schedule import DONE, release_task, steps_of_task, take_task
from megamoe.kernel.trace import EXPAND, now, record_begin, record_end

ROWS = gl.constexpr(128)  # of a stage: one a thread
GROUPS = gl.constexpr(plan.EXPAND_STAGES)  # of 128 of K, in a stage of codes

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
def expand_codes(codes, offsets):
    """int8 [.., 32], words of the eight e2m1 codes of 4 of k and 4 of k + 32, and int32 [.., 1],
    the exponent offsets of both blocks in the low bytes -> two e4m3 [.., 32] of adjacent K.
    """
    low0, low1, high0, high1 = code_tables(offsets & 0xFF, (offsets >> 8) & 0xFF)
    zero = codes.to(gl.int32) * 0
    return gl.inline_asm_elementwise(
        EXPAND_WORD,
        "=&r,=&r" + ",r" * 17,
        [codes, low0 + zero, low1 + zero, high0 + zero, high1 + zero],
        dtype=(gl.float8e4nv, gl.float8e4nv),
        is_pure=True,
        pack=4,
    )


@gluon.jit
def expand_group(rings, source, stage, G: gl.constexpr, spec: gl.constexpr):
    """128 of K of landed codes, their K group G: from codes to operands, a row a thread."""
    by_row: gl.constexpr = gl.BlockedLayout([1, 64], [32, 1], [gl.num_warps(), 1], [1, 0])
    landed = rings.packed.index(source).slice(G * 64, 64, 1)
    codes = landed.load(by_row).reshape((ROWS, 2, 32))
    layout: gl.constexpr = codes.type.layout
    rows: gl.constexpr = gl.SliceLayout(1, gl.SliceLayout(2, layout))
    # a plain view
    VIEW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    LINES: gl.constexpr = spec.packed_stages * GROUPS
    plain = reinterpret(rings.factors, gl.int32, [LINES, ROWS], VIEW)
    half = gl.arange(0, 2, layout=gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :]
    offsets = plain.index(source * GROUPS + G).load(rows)[:, None] >> (16 * half)
    low, high = expand_codes(codes, offsets[:, :, None])
    values = gl.join(low, high).permute((0, 1, 3, 2)).reshape((ROWS, 128))
    rings.w.index(stage).store(values)


@gluon.jit
def expand_tile(rings, pair, pairs, spec: gl.constexpr):
    """A tile of `pairs` pairs of stages, so that the way through the barriers is paid once for
    both.
    """
    source = pair % spec.packed_stages
    for p in range(pair, pair + pairs):
        mbarrier.wait(rings.packed_full.index(source), (p // spec.packed_stages) & 1)
        # stages are given back in order: with the second the first is free too
        last = GROUPS * p + 1
        mbarrier.wait(rings.empty.index(last % spec.stages), ((last // spec.stages) & 1) ^ 1)
        first = GROUPS * p % spec.stages
        expand_group(rings, source, first, 0, spec)
        expand_group(rings, source, first + 1, 1, spec)
        fence_async_shared()
        cta_barrier()
        mbarrier.arrive(rings.full.index(first), count=1)
        mbarrier.arrive(rings.full.index(first + 1), count=1)
        mbarrier.arrive(rings.packed_empty.index(source), count=1)
        # carried: computed from p, each of a thread's addresses would become a product of its own
        source = gl.where(source == spec.packed_stages - 1, 0, source + 1)
    return pair + pairs


@gluon.jit
def expand_role(ctx, rings):
    """Four warps."""
    spec: gl.constexpr = ctx.spec
    pair = 0
    i = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    begin = now(ctx)
    while kind != DONE:
        record_begin(ctx, EXPAND, i, kind, block, tile, begin)
        steps = steps_of_task(kind, spec)
        pair = expand_tile(rings, pair, steps // GROUPS, spec)
        begin = now(ctx)  # of the next one, and no middle: nothing is held through the loop
        record_end(ctx, EXPAND, i, begin, begin)
        release_task(rings, i)
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
