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

# kinds of work beside the two matrix products, which keep their task kinds 0 and 1
ROUTE = gl.constexpr(3)
WAIT_COUNTS = gl.constexpr(4)
PULL = gl.constexpr(5)
COMBINE = gl.constexpr(6)

TIMER = gl.constexpr("mov.u64 $0, %globaltimer; // $1")


@gluon.jit
def now(ctx):
    """Nanoseconds of the GPU's global timer; 0 when no timeline is recorded."""
    if ctx.spec.trace_events > 0:
        return gl.inline_asm_elementwise(
            TIMER, "=l,r,~{memory}", [ctx.rank], dtype=gl.int64, is_pure=False, pack=1
        )
    else:
        return ctx.rank.to(gl.int64) * 0


@gluon.jit
def two_words(ctx, ROLE: gl.constexpr, i, first, second, START: gl.constexpr):
    """Store words START and START + 1 of event i of this program's role."""
    events: gl.constexpr = ctx.spec.trace_events
    row = (gl.program_id(0) * ROLE_COUNT + ROLE) * events + gl.minimum(i, events - 1)
    where = ctx.region(ctx.spec.offset.trace, gl.int64) + row.to(gl.int64) * TRACE_WORDS + START
    one: gl.constexpr = gl.BlockedLayout([2], [32], [gl.num_warps()], [0])
    word = gl.arange(0, 2, layout=one)  # of one thread: a wide store
    gl.store(where + word, gl.where(word == 0, first, second))


@gluon.jit
def record_begin(ctx, ROLE: gl.constexpr, i, kind, block, tile, begin):
    """Event i of this program's role: what it is, and when it began."""
    if ctx.spec.trace_events > 0:
        tag = (begin * 0 + kind) * (1 << 48) + (begin * 0 + block) * (1 << 16) + tile
        two_words(ctx, ROLE, i, tag, begin, 0)


@gluon.jit
def record_end(ctx, ROLE: gl.constexpr, i, middle, end):
    """When it changed from waiting to working, and when it ended."""
    if ctx.spec.trace_events > 0:
        two_words(ctx, ROLE, i, middle, end, 2)


@gluon.jit
def record(ctx, ROLE: gl.constexpr, i, kind, block, tile, begin, middle, end):
    """A whole event."""
    record_begin(ctx, ROLE, i, kind, block, tile, begin)
    record_end(ctx, ROLE, i, middle, end)
