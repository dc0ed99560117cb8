"""Combine: add a token's partials in ascending slot order once they have all come back."""

from megamoe.kernel.compat import gl, gluon
from megamoe.kernel.sync import PHASE_PARTIALS, wait_sys
from megamoe.kernel.trace import COMBINE, now, record

COMBINE_TOKENS = gl.constexpr(4)  # a partition's tokens at once: one a warp
COMBINE_COLUMNS = gl.constexpr(
    256
)  # and columns: many small units, so that a short call is spread over all programs


@gluon.jit
def combine_role(ctx, WORKER: gl.constexpr, WORKERS: gl.constexpr, ROLE: gl.constexpr, event):
    """Sum in fp32, round once to bf16; a token without active slots becomes a zero row.

    Partition WORKER of WORKERS in each program: communicate comes as soon as it has pulled its
    rows, the math partitions when they have no more tiles.  `event` is the first free place in
    this role's timeline.
    """
    spec: gl.constexpr = ctx.spec
    TOPK: gl.constexpr = spec.topk
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [warps, 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(1, layout)
    columns = gl.arange(0, COMBINE_COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    topk_idx = ctx.region(spec.offset.topk_idx, gl.int32)
    partials = ctx.region(spec.offset.partials, gl.bfloat16)
    arrivals = ctx.region(spec.offset.token_arrivals, gl.int32) + ctx.counter_set * (
        spec.offset.token_set // 4
    )
    event = gl.to_tensor(event)
    chunks: gl.constexpr = spec.padded_hidden // COMBINE_COLUMNS
    units = (ctx.tokens + (COMBINE_TOKENS - 1)) // COMBINE_TOKENS * chunks
    for unit in range(
        WORKER * gl.num_programs(0) + gl.program_id(0), units, WORKERS * gl.num_programs(0)
    ):
        token = unit // chunks * COMBINE_TOKENS + gl.arange(0, COMBINE_TOKENS, layout=line)
        column = unit % chunks * COMBINE_COLUMNS + columns
        real = token < ctx.tokens
        token = gl.minimum(token, ctx.tokens - 1)
        active = token * 0
        bad = token * 0
        for slot in gl.static_range(TOPK):
            expert = gl.load(topk_idx + token * spec.topk + slot)
            active += ((expert >= 0) & (expert < spec.experts)).to(gl.int32)
            bad += ((expert < -1) | (expert >= spec.experts)).to(gl.int32)
        begin = now(ctx)
        seen = wait_sys(
            arrivals + token,
            active,
            ctx.status() + token * 0,
            PHASE_PARTIALS,
            token,
            spec.timeout_ns,
        )
        ready = now(ctx)
        # NaN, not a sum of what there is: after an abort, or with an expert id out of range
        complete = ((seen >= active) & (bad == 0))[:, None]
        row = partials + token.to(gl.int64)[:, None] * (spec.topk * spec.padded_hidden) + column
        total = gl.zeros((COMBINE_TOKENS, COMBINE_COLUMNS), gl.float32, layout)
        for slot in gl.static_range(TOPK):
            used = (gl.load(topk_idx + token * spec.topk + slot) >= 0)[:, None]
            total += gl.load(
                row + slot * spec.padded_hidden,
                mask=used & complete,
                other=0.0,
                cache_modifier=".cg",
            ).to(gl.float32)
        total = gl.where(complete, total, float("nan"))
        target = ctx.y + token.to(gl.int64)[:, None] * spec.hidden + column
        gl.store(target, total.to(gl.bfloat16), mask=real[:, None] & (column < spec.hidden))
        record(ctx, ROLE, event, COMBINE, unit, 0, begin, ready, now(ctx))
        event += 1
