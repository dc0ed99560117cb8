"""The timeline: each role writes when it began and ended a piece of work, if the launch was
compiled to do so.
"""

from megamoe import plan
from megamoe.kernel.compat import gl, gluon

# index of a role's events, in the order of plan.ROLES; math partitions are 0 and 1
COMMUNICATE = gl.constexpr(2)
LOAD_WEIGHTS = gl.constexpr(3)
LOAD_TOKENS = gl.constexpr(4)
SIGNAL = gl.constexpr(5)
EXPAND = gl.constexpr(6)
ROLE_COUNT = gl.constexpr(len(plan.ROLES))
TRACE_WORDS = gl.constexpr(plan.TRACE_WORDS)
BLOCK_BIT = gl.constexpr(plan.TRACE_BLOCK_BIT)
KIND_BIT = gl.constexpr(plan.TRACE_KIND_BIT)

# kinds of work beside the tasks, which keep theirs: 0, 1 and 7 (schedule.py)
UNPACK = gl.constexpr(2)
ROUTE = gl.constexpr(3)
WAIT_COUNTS = gl.constexpr(4)
PULL = gl.constexpr(5)
COMBINE = gl.constexpr(6)

TIMER = gl.constexpr("mov.u32 $0, %globaltimer_lo; // $1")
# $1 where, $2 and $3 what
TWO_WORDS = gl.constexpr("""
st.relaxed.gpu.global.b32 [$1], $2;
st.relaxed.gpu.global.b32 [$1+4], $3;
mov.b32 $0, 0;
""")


@gluon.jit
def now(ctx):
    """Nanoseconds of the GPU's global timer, the low 32 bits; 0 when no timeline is recorded."""
    if ctx.spec.trace_events > 0:
        return gl.inline_asm_elementwise(
            TIMER, "=r,r,~{memory}", [ctx.rank], dtype=gl.int32, is_pure=False, pack=1
        )
    else:
        return ctx.rank * 0


@gluon.jit
def place_of(ctx, ROLE: gl.constexpr, i):
    """Pointer to the words of event i of this program's role."""
    events: gl.constexpr = ctx.spec.trace_events
    row = (gl.program_id(0) * ROLE_COUNT + ROLE) * events + gl.minimum(i, events - 1)
    return ctx.region(ctx.spec.offset.trace, gl.int32) + row.to(gl.int64) * TRACE_WORDS


@gluon.jit
def store_two(where, first, second):
    """By every thread, a word at a time: to choose a thread and to join the words takes longer, and
    a role that records is not at work.
    """
    gl.inline_asm_elementwise(
        TWO_WORDS,
        "=r,l,r,r,~{memory}",
        [where, first, second],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )


@gluon.jit
def record_begin(ctx, ROLE: gl.constexpr, i, kind, block, tile, begin):
    """Event i of this program's role: what it is, and when it began."""
    if ctx.spec.trace_events > 0:
        tag = (begin * 0 + kind) << KIND_BIT | block << BLOCK_BIT | tile
        store_two(place_of(ctx, ROLE, i), tag, begin)


@gluon.jit
def record_end(ctx, ROLE: gl.constexpr, i, middle, end):
    """When it changed from waiting to working, and when it ended."""
    if ctx.spec.trace_events > 0:
        store_two(place_of(ctx, ROLE, i) + 2, middle, end)


@gluon.jit
def record(ctx, ROLE: gl.constexpr, i, kind, block, tile, begin, middle, end):
    """A whole event."""
    record_begin(ctx, ROLE, i, kind, block, tile, begin)
    record_end(ctx, ROLE, i, middle, end)
