"""The timeline: each role writes when it began and ended a piece of work, if the launch was
compiled to do so.
"""

from megamoe import plan
from megamoe.kernel.compat import gl, gluon

# index of a role's events, in the order of plan.ROLES; math partitions are 0 to 3
COMMUNICATE = gl.constexpr(4)
LOAD_WEIGHTS = gl.constexpr(5)
LOAD_TOKENS = gl.constexpr(6)
SIGNAL = gl.constexpr(7)
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
        gl.store(where, tag)
        gl.store(where + 1, begin)
        gl.store(where + 2, middle)
        gl.store(where + 3, end)
