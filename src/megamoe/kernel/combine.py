"""Combine: add a token's partials in ascending slot order once they have all come back.

A call with few tokens is cut into small units, which all programs share.  In a longer one each
program has tokens of its own and takes them in the order in which they should come back: a token is
complete with the last of its experts, and every rank works through its experts in order.  Then the
communicate role adds up between its pulls what has come back already, and the math partitions what
is left at the end.
"""

from megamoe.kernel.compat import gl, gluon
from megamoe.kernel.sync import PHASE_PARTIALS, peek_sys, wait_sys
from megamoe.kernel.trace import COMBINE, now, record

TOKENS = gl.constexpr(4)  # a partition's tokens at once: one a warp
COLUMNS = gl.constexpr(256)  # and columns
STEPS = gl.constexpr(4)  # times COLUMNS: what is claimed at once in a long call
ORDERED = gl.constexpr(64)  # tokens of a program that are put in order


@gluon.jit
def partials_of(ctx, token):
    """(how many partials of each token come back, how many of its expert ids are out of range)."""
    spec: gl.constexpr = ctx.spec
    TOPK: gl.constexpr = spec.topk
    topk_idx = ctx.region(spec.offset.topk_idx, gl.int32)
    active = token * 0
    bad = token * 0
    for slot in gl.static_range(TOPK):
        expert = gl.load(topk_idx + token * spec.topk + slot)
        active += ((expert >= 0) & (expert < spec.experts)).to(gl.int32)
        bad += ((expert < -1) | (expert >= spec.experts)).to(gl.int32)
    return active, bad


@gluon.jit
def arrivals_of(ctx):
    """Pointer to the partials of each token that have come back in this call."""
    arrivals = ctx.region(ctx.spec.offset.token_arrivals, gl.int32)
    return arrivals + ctx.counter_set * (ctx.spec.offset.token_set // 4)


@gluon.jit
def add_up(ctx, token, complete, real, start, layout: gl.constexpr):
    """COLUMNS columns of y for four tokens: summed in fp32, rounded once to bf16."""
    spec: gl.constexpr = ctx.spec
    TOPK: gl.constexpr = spec.topk
    column = start + gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    topk_idx = ctx.region(spec.offset.topk_idx, gl.int32)
    partials = ctx.region(spec.offset.partials, gl.bfloat16)
    row = partials + token.to(gl.int64)[:, None] * (spec.topk * spec.padded_hidden) + column
    total = gl.zeros((TOKENS, COLUMNS), gl.float32, layout)
    for slot in gl.static_range(TOPK):
        used = (gl.load(topk_idx + token * spec.topk + slot) >= 0)[:, None]
        total += gl.load(
            row + slot * spec.padded_hidden,
            mask=used & complete[:, None],
            other=0.0,
            cache_modifier=".cg",
        ).to(gl.float32)
    # NaN, not a sum of what there is: after an abort, or with an expert id out of range
    total = gl.where(complete[:, None], total, float("nan"))
    target = ctx.y + token.to(gl.int64)[:, None] * spec.hidden + column
    gl.store(target, total.to(gl.bfloat16), mask=real[:, None] & (column < spec.hidden))


@gluon.jit
def wait_and_add(
    ctx, token, real, start, end, unit, ROLE: gl.constexpr, event, layout: gl.constexpr
):
    """Columns `start` to `end` of four tokens, once their partials are there."""
    spec: gl.constexpr = ctx.spec
    active, bad = partials_of(ctx, token)
    begin = now(ctx)
    seen = wait_sys(
        arrivals_of(ctx) + token,
        active,
        ctx.status() + token * 0,
        PHASE_PARTIALS,
        token,
        spec.timeout_ns,
    )
    ready = now(ctx)
    complete = (seen >= active) & (bad == 0)
    for column in range(start, end, COLUMNS):
        add_up(ctx, token, complete, real, column, layout)
    record(ctx, ROLE, event, COMBINE, unit, 0, begin, ready, now(ctx))


# --- long calls --------------------------------------------------------------------------------


@gluon.jit
def is_long(ctx):
    """Whether every program has tokens of its own."""
    return ctx.tokens >= TOKENS * gl.num_programs(0)


@gluon.jit
def own_claims(ctx):
    """Into how many claims this program's tokens are cut, and how many claims share four tokens."""
    width: gl.constexpr = COLUMNS * STEPS
    SHARES: gl.constexpr = (ctx.spec.padded_hidden + (width - 1)) // width
    programs = gl.num_programs(0)
    own = (ctx.tokens - gl.program_id(0) + (programs - 1)) // programs
    return (own + (TOKENS - 1)) // TOKENS * SHARES, SHARES


@gluon.jit
def claimed(ctx):
    """Pointer to the number of this program's claims that have been taken in this call."""
    counters = ctx.region(ctx.spec.offset.claimed, gl.int32)
    return counters + ctx.counter_set * (ctx.spec.offset.program_set // 4) + gl.program_id(0)


@gluon.jit
def own_tokens(ctx, group, layout: gl.constexpr):
    """This program's tokens number 4 * group to 4 * group + 3 in the order in which they should
    come back, and whether there are so many.
    """
    spec: gl.constexpr = ctx.spec
    TOPK: gl.constexpr = spec.topk
    pick: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [gl.num_warps(), 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(0, pick)
    GROUPS: gl.constexpr = ORDERED // TOKENS
    programs = gl.num_programs(0)
    lane = gl.arange(0, ORDERED, layout=line)
    token = (group // GROUPS * ORDERED + lane) * programs + gl.program_id(0)
    real = token < ctx.tokens
    topk_idx = ctx.region(spec.offset.topk_idx, gl.int32)
    last = lane * 0 - 1
    for slot in gl.static_range(TOPK):
        expert = gl.load(topk_idx + token * spec.topk + slot, mask=real, other=0)
        place = gl.maximum(expert, 0) % spec.experts_per_rank
        last = gl.maximum(last, gl.where(expert >= 0, place, -1))
    key = gl.where(real, last, spec.experts_per_rank) * ORDERED + lane
    place = gl.sum(
        (gl.convert_layout(key, gl.SliceLayout(1, pick))[:, None] < key[None, :]).to(gl.int32), 0
    )
    wanted = group % GROUPS * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, pick))
    token = gl.sum(gl.where(place[None, :] == wanted[:, None], token[None, :], 0), 1)
    token = gl.convert_layout(token, gl.SliceLayout(1, layout))
    return gl.minimum(token, ctx.tokens - 1), token < ctx.tokens


@gluon.jit
def combine_own(ctx, ROLE: gl.constexpr, event):
    """Take claims of this program's tokens until there are none left."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    claims, shares = own_claims(ctx)
    counter = claimed(ctx)
    claim = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
    while claim < claims:
        ahead = gl.atomic_add(counter, 1, sem="relaxed", scope="gpu")
        token, real = own_tokens(ctx, claim // shares, layout)
        start = claim % shares * (COLUMNS * STEPS)
        end = gl.minimum(start + COLUMNS * STEPS, ctx.spec.padded_hidden)
        wait_and_add(ctx, token, real, start, end, claim, ROLE, event, layout)
        event += 1
        claim = ahead
    return event


@gluon.jit
def combine_complete(ctx, claim, ROLE: gl.constexpr, event):
    """Take the next claim of this program's tokens if they are complete; never waits.

    `claim`: the first that this partition does not know to be taken.  Returns it, and the next
    free event.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    claims, shares = own_claims(ctx)
    if claim < claims:
        begin = now(ctx)
        token, real = own_tokens(ctx, claim // shares, layout)
        active, bad = partials_of(ctx, token)
        missing = peek_sys(arrivals_of(ctx) + token) < active
        if gl.max(missing.to(gl.int32), 0) == 0:
            found = gl.atomic_cas(claimed(ctx), claim, claim + 1, sem="relaxed", scope="gpu")
            if found == claim:
                ready = now(ctx)
                start = claim % shares * (COLUMNS * STEPS)
                end = gl.minimum(start + COLUMNS * STEPS, ctx.spec.padded_hidden)
                for column in range(start, end, COLUMNS):
                    add_up(ctx, token, bad == 0, real, column, layout)
                record(ctx, ROLE, event, COMBINE, claim, 0, begin, ready, now(ctx))
                event += 1
            claim = gl.maximum(found, claim + 1)
    return claim, event


# --- all calls ---------------------------------------------------------------------------------


@gluon.jit
def combine_role(ctx, WORKER: gl.constexpr, WORKERS: gl.constexpr, ROLE: gl.constexpr, event):
    """Every token becomes a row of y, one without active slots a row of zeros.

    Partition WORKER of WORKERS in each program: communicate comes as soon as it has pulled its
    rows, the math partitions when they have no more tiles.  `event` is the first free place in
    this role's timeline.
    """
    spec: gl.constexpr = ctx.spec
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    event = gl.to_tensor(event)
    if is_long(ctx):
        event = combine_own(ctx, ROLE, event)
    else:
        chunks: gl.constexpr = spec.padded_hidden // COLUMNS
        units = (ctx.tokens + (TOKENS - 1)) // TOKENS * chunks
        for unit in range(
            WORKER * gl.num_programs(0) + gl.program_id(0), units, WORKERS * gl.num_programs(0)
        ):
            token = unit // chunks * TOKENS + gl.arange(0, TOKENS, layout=gl.SliceLayout(1, layout))
            real = token < ctx.tokens
            token = gl.minimum(token, ctx.tokens - 1)
            start = unit % chunks * COLUMNS
            wait_and_add(ctx, token, real, start, start + COLUMNS, unit, ROLE, event, layout)
            event += 1
