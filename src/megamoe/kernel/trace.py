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
def record(ctx, ROLE: gl.constexpr, i, kind, block, tile, begin, middle, end):
    """Event i of this program's role: what it was, and when it began, changed from waiting to
    working, and ended.
    """
    events: gl.constexpr = ctx.spec.trace_events
    if events > 0:
        row = (gl.program_id(0) * ROLE_COUNT + ROLE) * events + gl.minimum(i, events - 1)
        where = ctx.region(ctx.spec.offset.trace, gl.int64) + row.to(gl.int64) * TRACE_WORDS
        tag = (begin * 0 + kind) * (1 << 48) + (begin * 0 + block) * (1 << 16) + tile
        one: gl.constexpr = gl.BlockedLayout([TRACE_WORDS], [32], [gl.num_warps()], [0])
        word = gl.arange(0, TRACE_WORDS, layout=one)  # of one thread: two wide stores
        times = gl.where(word == 1, begin, gl.where(word == 2, middle, end))
        gl.store(where + word, gl.where(word == 0, tag, times))
