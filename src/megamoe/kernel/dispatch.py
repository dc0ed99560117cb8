"""Dispatch: tell every owner which rows to fetch, then fetch the rows this rank's experts need.

Each program counts and routes a share of the tokens; the program that arrives last publishes the
rank's counts.
Then rows are pulled from the source ranks into the pool, `pull_rows` at a time, each row bumping
the counter of its block.  Rows of one expert lie together, source ranks in turn starting from this
one, so that ranks do not all read from the same peer.
"""

from megamoe.kernel.combine import combine_complete, is_long
from megamoe.kernel.compat import cta_barrier, gl, gluon
from megamoe.kernel.schedule import add, first_blocks, recv_counts, rows_of_experts
from megamoe.kernel.sync import (
    PHASE_BAD_EXPERT,
    PHASE_SLOT,
    arrive_last,
    peek_sys,
    report,
    set_peers,
    signal_rows,
    wait_gpu,
)
from megamoe.kernel.trace import COMMUNICATE, PULL, ROUTE, WAIT_COUNTS, now, record
from megamoe.kernel.unpack import unpack_expert
from megamoe.plan import CONTROL

CHUNK = gl.constexpr(128)  # (token, slot) pairs a partition routes at once: one a thread
CONTROL_EPOCH = gl.constexpr(CONTROL["epoch"])
CONTROL_COUNTED = gl.constexpr(CONTROL["counted"])
CONTROL_USED_TOKENS = gl.constexpr(CONTROL["used_tokens"])
CONTROL_USED_BLOCKS = gl.constexpr(CONTROL["used_blocks"])
CONTROL_INEXACT = gl.constexpr(CONTROL["inexact"])


@gluon.jit
def clear(pointer, count, layout: gl.constexpr):
    """Zero `count` int32 words, shared between the programs."""
    i = gl.arange(0, CHUNK, layout=layout)
    zero = i * 0
    for start in range(gl.program_id(0) * CHUNK, count, gl.num_programs(0) * CHUNK):
        gl.store(pointer + start + i, zero, mask=start + i < count)


@gluon.jit
def clear_other_set(ctx, layout: gl.constexpr):
    """Zero the counters that the next call will use, as far as the call before this one used
    them: nobody else touches them before the next launch has published its counts.
    """
    spec: gl.constexpr = ctx.spec
    other = 1 - ctx.counter_set
    control = ctx.region(spec.offset.control, gl.int32)
    used_tokens = gl.load(control + CONTROL_USED_TOKENS + other)
    used_blocks = gl.load(control + CONTROL_USED_BLOCKS + other)
    blocks = other * (spec.offset.block_set // 4)
    clear(
        ctx.region(spec.offset.send_counts, gl.int32) + other * spec.experts, spec.experts, layout
    )
    clear(ctx.region(spec.offset.arrived, gl.int32) + blocks, used_blocks, layout)
    clear(ctx.region(spec.offset.l1_done, gl.int32) + blocks, used_blocks, layout)
    clear(ctx.region(spec.offset.l2_done, gl.int32) + blocks, used_blocks, layout)
    tokens = other * (spec.offset.token_set // 4)
    clear(ctx.region(spec.offset.token_arrivals, gl.int32) + tokens, used_tokens, layout)
    WORDS: gl.constexpr = spec.offset.unpacked_set // 4
    if WORDS > 0:  # whether this call unpacks or not: the one before may have
        clear(ctx.region(spec.offset.unpacked, gl.int32) + other * WORDS, WORDS, layout)
    claimed = ctx.region(spec.offset.claimed, gl.int32) + other * (spec.offset.program_set // 4)
    gl.store(claimed + gl.program_id(0), 0)


@gluon.jit
def route(ctx, layout: gl.constexpr):
    """Append each (token, slot) of this program's share to its owner's list for that expert."""
    spec: gl.constexpr = ctx.spec
    i = gl.arange(0, CHUNK, layout=layout)
    entries = ctx.tokens * spec.topk
    topk_idx = ctx.region(spec.offset.topk_idx, gl.int32)
    send_counts = ctx.region(spec.offset.send_counts, gl.int32) + ctx.counter_set * spec.experts
    for start in range(gl.program_id(0) * CHUNK, entries, gl.num_programs(0) * CHUNK):
        entry = start + i
        expert = gl.load(topk_idx + entry, mask=entry < entries, other=-1)
        bad = (expert < -1) | (expert >= spec.experts)
        report(ctx.status() + entry * 0, PHASE_BAD_EXPERT, entry, expert, bad.to(gl.int32))
        routed = (expert >= 0) & (expert < spec.experts)
        expert = gl.where(routed, expert, 0)
        position = gl.atomic_add(
            send_counts + expert, entry * 0 + 1, mask=routed, sem="relaxed", scope="gpu"
        )
        owner = expert // spec.experts_per_rank
        lists = ctx.peer_region(owner, spec.offset.routes, gl.int32)
        row = ctx.rank * spec.experts_per_rank + expert % spec.experts_per_rank
        gl.store(
            lists + row.to(gl.int64) * (spec.capacity * spec.topk) + position, entry, mask=routed
        )


@gluon.jit
def publish_counts(ctx, layout: gl.constexpr):
    """Write this rank's counts to their owners, then raise its flag there.  Runs in one program of
    the rank.
    """
    spec: gl.constexpr = ctx.spec
    e = gl.arange(0, spec.all_expert_lanes, layout=layout)
    exists = e < spec.experts
    expert = gl.where(exists, e, 0)
    send_counts = ctx.region(spec.offset.send_counts, gl.int32) + ctx.counter_set * spec.experts
    count = gl.load(send_counts + expert, mask=exists, other=0, cache_modifier=".cg")
    owner = expert // spec.experts_per_rank
    theirs = ctx.peer_region(owner, spec.offset.recv_counts, gl.int32)
    row = ctx.counter_set * spec.ranks + ctx.rank
    gl.store(
        theirs + row * spec.experts_per_rank + expert % spec.experts_per_rank, count, mask=exists
    )
    control = ctx.region(spec.offset.control, gl.int32)
    gl.store(control + CONTROL_COUNTED, 0)
    gl.store(control + CONTROL_EPOCH, ctx.epoch)
    gl.store(control + CONTROL_USED_TOKENS + ctx.counter_set, ctx.tokens)
    r = gl.arange(0, CHUNK, layout=layout)
    peer = gl.where(r < spec.ranks, r, 0)
    flags = ctx.peer_region(peer, spec.offset.counts_ready, gl.int32) + ctx.rank
    set_peers(flags, r * 0 + ctx.epoch, r < spec.ranks)


@gluon.jit
def find_rows(row, rows, first, BLOCK_M: gl.constexpr, LANES: gl.constexpr, layout: gl.constexpr):
    """For rows counted over all experts: (local expert, index within the expert, pool block, rows
    of the expert).
    """
    lanes: gl.constexpr = gl.SliceLayout(0, layout)
    expert_rows = gl.convert_layout(rows, lanes)[None, :]
    expert_first = gl.convert_layout(first, lanes)[None, :]
    e = gl.arange(0, LANES, layout=lanes)[None, :]
    ends = gl.associative_scan(expert_rows, 1, add)
    inside = (row[:, None] >= ends - expert_rows) & (row[:, None] < ends)
    expert = gl.sum(gl.where(inside, e, 0), 1)
    index = gl.sum(gl.where(inside, row[:, None] - (ends - expert_rows), 0), 1)
    block = gl.sum(gl.where(inside, expert_first, 0), 1) + index // BLOCK_M
    count = gl.sum(gl.where(inside, expert_rows, 0), 1)
    return expert, index, block, count


@gluon.jit
def find_sources(ctx, expert, index):
    """Source rank of each row, and its place in that rank's list for the expert."""
    spec: gl.constexpr = ctx.spec
    RANKS: gl.constexpr = spec.ranks
    counts = recv_counts(ctx)
    source = expert * 0
    place = expert * 0
    base = expert * 0
    for step in gl.static_range(RANKS):
        r = (ctx.rank + step) % spec.ranks
        count = gl.load(counts + r * spec.experts_per_rank + expert, cache_modifier=".cg")
        here = (index >= base) & (index < base + count)
        source = gl.where(here, r, source)
        place = gl.where(here, index - base, place)
        base += count
    return source, place


@gluon.jit
def combine_while_taken(ctx, done, wanted, claim, event):
    """Add complete tokens up as long as a ring slot is waited for, which is the time for it: done
    earlier, rows come late, done later, it is left for the end.

    done, wanted: flags of the blocks that hold the slots.  Returns as
    :func:`~megamoe.kernel.combine.combine_complete`.
    """
    useful = is_long(ctx)
    while useful & (gl.max((peek_sys(done) < wanted).to(gl.int32), 0) > 0):
        tried = claim
        claim, event = combine_complete(ctx, claim, COMMUNICATE, event)
        useful = claim > tried
    return claim, event


@gluon.jit
def unpack_until(ctx, expert, end, rows, event):
    """Unpack this program's share of the experts from `expert` to `end` - 1, of those with rows;
    returns where to go on, and the next free event.
    """
    spec: gl.constexpr = ctx.spec
    e = gl.arange(0, spec.expert_lanes, layout=rows.type.layout)
    while expert < end:
        if gl.sum(gl.where(e == expert, rows, 0), 0) > 0:
            event = unpack_expert(ctx, expert, event)
        expert += 1
    return expert, event


@gluon.jit
def pull(ctx, rows, first, blocks, unpacked, event):
    """Fetch this program's share of the rows into the pool; returns the next free event."""
    spec: gl.constexpr = ctx.spec
    n: gl.constexpr = spec.pull_rows
    warps: gl.constexpr = gl.num_warps()
    # rows x experts, to look rows up
    find: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    each: gl.constexpr = gl.SliceLayout(1, find)
    total = gl.sum(rows, 0)
    arrived = ctx.block_counters(spec.offset.arrived)
    l2_done = ctx.block_counters(spec.offset.l2_done)
    routes = ctx.region(spec.offset.routes, gl.int32)
    weights = ctx.region(spec.offset.pool_weight, gl.float32)
    origins = ctx.region(spec.offset.pool_origin, gl.int64)
    inexact = 0
    event = gl.to_tensor(event)
    claim = gl.to_tensor(0)
    for unit in range(gl.program_id(0), (total + (n - 1)) // n, gl.num_programs(0)):
        begin = now(ctx)
        row = unit * n + gl.arange(0, n, layout=each)
        real = row < total
        row = gl.minimum(row, total - 1)
        expert, index, block, count = find_rows(
            row, rows, first, spec.block_m, spec.expert_lanes, find
        )
        if spec.unpacks:
            unpacked, event = unpack_until(ctx, unpacked, gl.max(expert, 0) + 1, rows, event)
            begin = now(ctx)
        source, place = find_sources(ctx, expert, index)
        list_row = (source * spec.experts_per_rank + expert).to(gl.int64)
        entry = gl.load(
            routes + list_row * (spec.capacity * spec.topk) + place, cache_modifier=".cg"
        )
        entry = gl.minimum(gl.maximum(entry, 0), spec.capacity * spec.topk - 1)
        if blocks > spec.ring_blocks:
            before = gl.maximum(block - spec.ring_blocks, 0)
            wanted = gl.where(block >= spec.ring_blocks, spec.l2_tiles, 0)
            if spec.phases == "fused":
                claim, event = combine_while_taken(ctx, l2_done + before, wanted, claim, event)
                begin = now(ctx)
            wait_gpu(
                l2_done + before,
                wanted,
                ctx.status() + before * 0,
                PHASE_SLOT,
                before,
                spec.timeout_ns,
            )
            cta_barrier()
        pool_row = (block % spec.ring_blocks) * spec.block_m + index % spec.block_m
        weight = gl.load(
            ctx.peer_region(source, spec.offset.topk_weights, gl.float32) + entry,
            mask=real,
            other=0.0,
        )
        ready = now(ctx)
        token = entry // spec.topk
        if spec.x_scales == "ue8m0_32":
            inexact += pull_rebased(ctx, source, token, pool_row, real)
        else:
            pull_scales(ctx, source, token, pool_row, real)
            pull_bytes(ctx, source, token, pool_row, real)
        gl.store(weights + pool_row, weight, mask=real)
        gl.store(origins + pool_row, source.to(gl.int64) * (1 << 32) + entry, mask=real)
        # the last row of an expert also brings the padding of its block
        padding = gl.where(
            index == count - 1, (spec.block_m - count % spec.block_m) % spec.block_m, 0
        )
        signal_rows(arrived + block, 1 + padding, real)
        record(ctx, COMMUNICATE, event, PULL, unit, 0, begin, ready, now(ctx))
        event += 1
    if spec.unpacks:
        unpacked, event = unpack_until(ctx, unpacked, spec.experts_per_rank, rows, event)
    if spec.x_scales == "ue8m0_32":
        control = ctx.region(spec.offset.control, gl.int32)
        gl.atomic_add(control + CONTROL_INEXACT, inexact, sem="relaxed", scope="gpu")
    return event


@gluon.jit
def pull_bytes(ctx, source, token, pool_row, real):
    """Copy rows as they are, in 4-byte words."""
    spec: gl.constexpr = ctx.spec
    warps: gl.constexpr = gl.num_warps()
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [warps, 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(1, layout)
    words: gl.constexpr = spec.padded_hidden * spec.x_bytes // 4
    width: gl.constexpr = spec.pull_words
    src = ctx.peer_region(gl.convert_layout(source, line), spec.offset.x, gl.int32)
    src = src + gl.convert_layout(token, line).to(gl.int64) * words
    dst = (
        ctx.region(spec.offset.pool_x, gl.int32)
        + gl.convert_layout(pool_row, line).to(gl.int64) * words
    )
    src = gl.multiple_of(src, 16)
    dst = gl.multiple_of(dst, 16)
    copy = gl.convert_layout(real, line)[:, None]
    w = gl.arange(0, width, layout=gl.SliceLayout(0, layout))[None, :]
    STEPS: gl.constexpr = words // width
    src = src[:, None] + w
    first = gl.load(src, mask=copy, other=0)
    second = gl.load(src + width, mask=copy & (STEPS > 1), other=0)
    third = gl.load(src + 2 * width, mask=copy & (STEPS > 2), other=0)
    for i in range(STEPS):
        data = first
        first = second
        second = third
        third = gl.load(src + (i + 3) * width, mask=copy & (i + 3 < STEPS), other=0)
        gl.store(dst[:, None] + (i * width + w), data, mask=copy)


@gluon.jit
def pull_scales(ctx, source, token, pool_row, real):
    """Copy the scales of rows: one a token, or one a block of 128, which the pool keeps block by
    block.
    """
    spec: gl.constexpr = ctx.spec
    pool = ctx.region(spec.offset.pool_x_scale, gl.float32)
    scales = ctx.peer_region(source, spec.offset.x_scale, gl.float32)
    if spec.x_scales == "token":
        gl.store(pool + pool_row, gl.load(scales + token, mask=real, other=0.0), mask=real)
    if spec.x_scales == "block128":
        BLOCKS: gl.constexpr = spec.padded_hidden // 128
        LANES: gl.constexpr = spec.code_lanes
        warps: gl.constexpr = gl.num_warps()
        by_block: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
        b = gl.arange(0, LANES, layout=gl.SliceLayout(0, by_block))[None, :]
        copy = real[:, None] & (b < BLOCKS)
        row = scales + token.to(gl.int64) * BLOCKS
        scale = gl.load(row[:, None] + b, mask=copy, other=0.0)
        gl.store(pool + b * spec.ring_rows + pool_row[:, None], scale, mask=copy)


# Four e4m3 times a power of two, rounded: products in fp16 are exact, or so far below the smallest
# e4m3 that they round to 0 either way.  A value has changed if the result, scaled back, differs;
# both sides of that comparison are taken 2^4 lower, where neither overflows.
# $0 result, $1 how many of the four changed; $2 the word, $3 2^-s twice, $4 2^(s - 4) twice
REBASE = gl.constexpr("""
{
.reg .b16 lo, hi;
.reg .b32 t, a, b, c, d, sixteenth;
mov.b32 sixteenth, 0x2c002c00;
shr.u32 t, $2, 16;
cvt.u16.u32 lo, $2;
cvt.u16.u32 hi, t;
cvt.rn.f16x2.e4m3x2 a, lo;
cvt.rn.f16x2.e4m3x2 b, hi;
mul.rn.f16x2 c, a, $3;
mul.rn.f16x2 d, b, $3;
cvt.rn.satfinite.e4m3x2.f16x2 lo, c;
cvt.rn.satfinite.e4m3x2.f16x2 hi, d;
cvt.u32.u16 t, hi;
shl.b32 t, t, 16;
cvt.u32.u16 c, lo;
or.b32 $0, t, c;
cvt.rn.f16x2.e4m3x2 c, lo;
cvt.rn.f16x2.e4m3x2 d, hi;
mul.rn.f16x2 c, c, $4;
mul.rn.f16x2 d, d, $4;
mul.rn.f16x2 a, a, sixteenth;
mul.rn.f16x2 b, b, sixteenth;
set.ne.f16x2.f16x2 a, a, c;
set.ne.f16x2.f16x2 b, b, d;
and.b32 a, a, 0x04000400;
and.b32 b, b, 0x08000800;
or.b32 a, a, b;
popc.b32 $1, a;
}
""")


@gluon.jit
def rebase(words, shift):
    """int32 words of four e4m3, and int32 s >= 0 of each -> (words of the values times 2^-s, how
    many of the four that changed).
    """
    s = gl.minimum(shift, 31)
    # bits of fp16, below 2^-14 subnormal
    down = gl.where(s < 15, (15 - s) << 10, (1 << 24) >> s)
    up = (gl.minimum(s, 19) + 11) << 10  # beyond, every result is 0
    return gl.inline_asm_elementwise(
        REBASE,
        "=&r,=&r,r,r,r",
        [words, down | (down << 16), up | (up << 16)],
        dtype=(gl.int32, gl.int32),
        is_pure=True,
        pack=1,
    )


@gluon.jit
def largest_code(codes, copy, GROUPS: gl.constexpr, LANES: gl.constexpr, layout: gl.constexpr):
    """The largest of GROUPS byte codes of each row; `codes` int32 pointers to rows."""
    word = gl.arange(0, LANES, layout=gl.SliceLayout(0, layout))[None, :]
    four = gl.load(codes[:, None] + word, mask=copy[:, None] & (word < GROUPS // 4), other=0)
    low = gl.maximum(four & 0xFF, (four >> 8) & 0xFF)
    high = gl.maximum((four >> 16) & 0xFF, (four >> 24) & 0xFF)
    return gl.max(gl.maximum(low, high), 1)


@gluon.jit
def sum_of_fours(words, N: gl.constexpr, GROUPS: gl.constexpr):
    """int32 [N, GROUPS, 8] -> [N, GROUPS, 2], each thread from what it has."""
    return gl.sum(words.reshape((N, GROUPS, 2, 4)), 3)


@gluon.jit
def pull_rebased(ctx, source, token, pool_row, real):
    """Copy e4m3 rows with UE8M0 scales per 32, rebased to one power-of-two scale a token.

    Returns how many values this changed: those more than 2^14 below the token's largest can lose
    bits.  A short loop: unrolled, its instructions alone took longer to fetch than the rows.
    """
    spec: gl.constexpr = ctx.spec
    N: gl.constexpr = spec.pull_rows
    warps: gl.constexpr = gl.num_warps()
    groups: gl.constexpr = spec.padded_hidden // 32
    width: gl.constexpr = spec.pull_groups
    STEPS: gl.constexpr = groups // width
    AHEAD: gl.constexpr = spec.pull_ahead  # steps on their way
    lanes: gl.constexpr = spec.code_lanes
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 4], [1, 16, 2], [warps, 1, 1], [2, 1, 0])
    tile: gl.constexpr = gl.SliceLayout(2, layout)  # rows x groups
    line: gl.constexpr = gl.SliceLayout(1, tile)
    by_code: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [warps, 1], [1, 0])
    by_row: gl.constexpr = gl.SliceLayout(1, by_code)
    copy = gl.convert_layout(real, line)[:, None]
    mask = copy[:, :, None]
    peer = gl.convert_layout(source, line)
    row = gl.convert_layout(token, line).to(gl.int64)
    target = gl.convert_layout(pool_row, line)
    src = ctx.peer_region(peer, spec.offset.x, gl.int32) + row * (groups * 8)
    dst = ctx.region(spec.offset.pool_x, gl.int32) + target.to(gl.int64) * (groups * 8)
    codes = ctx.peer_region(peer, spec.offset.x_scale, gl.uint8) + row * groups
    g = gl.arange(0, width, layout=gl.SliceLayout(0, tile))[None, :]
    word = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    offset = (g * 8)[:, :, None] + word
    src = gl.multiple_of(src, 16)[:, None][:, :, None] + offset
    dst = gl.multiple_of(dst, 16)[:, None][:, :, None] + offset
    codes_of_step = codes[:, None] + g
    first = gl.load(src, mask=mask, other=0)
    code1 = gl.load(codes_of_step, mask=copy, other=0)
    if AHEAD == 3:
        second = gl.load(src + width * 8, mask=mask & (STEPS > 1), other=0)
        third = gl.load(src + 2 * width * 8, mask=mask & (STEPS > 2), other=0)
        code2 = gl.load(codes_of_step + width, mask=copy & (STEPS > 1), other=0)
        code3 = gl.load(codes_of_step + 2 * width, mask=copy & (STEPS > 2), other=0)
    words_of_codes = gl.convert_layout(codes, by_row).to(gl.pointer_type(gl.int32), bitcast=True)
    top = largest_code(words_of_codes, gl.convert_layout(real, by_row), groups, lanes, by_code)
    top = gl.convert_layout(top, line)
    changed = sum_of_fours(gl.zeros((N, width, 8), gl.int32, layout), N, width)
    for i in range(STEPS):
        x = first
        code = code1.to(gl.int32)
        more = i + AHEAD < STEPS
        words = gl.load(src + (i + AHEAD) * (width * 8), mask=mask & more, other=0)
        some_codes = gl.load(codes_of_step + (i + AHEAD) * width, mask=copy & more, other=0)
        if AHEAD == 3:
            first = second
            second = third
            third = words
            code1 = code2
            code2 = code3
            code3 = some_codes
        else:
            first = words
            code1 = some_codes
        shift = gl.zeros((N, width, 8), gl.int32, layout) + (top[:, None] - code)[:, :, None]
        moved, some = rebase(x, shift)
        gl.store(dst + i * (width * 8), moved, mask=mask)
        changed += sum_of_fours(some, N, width)
    # 2^(code - 127); code 0 is the subnormal 2^-127, code 255 is NaN
    scale = gl.where(top == 0, 1 << 22, gl.where(top == 255, 0x7FC00000, top << 23)).to(
        gl.float32, bitcast=True
    )
    pool = ctx.region(spec.offset.pool_x_scale, gl.float32)
    gl.store(pool + target, scale, mask=gl.convert_layout(real, line))
    return gl.sum(gl.sum(gl.sum(changed, 2), 1), 0)


@gluon.jit
def dispatch_role(ctx):
    """Four warps: route, publish, pull, clear.  Returns the number of events recorded."""
    spec: gl.constexpr = ctx.spec
    scope: gl.constexpr = spec.scope
    begin = now(ctx)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    route(ctx, layout)
    control = ctx.region(spec.offset.control, gl.int32)
    if arrive_last(control + CONTROL_COUNTED, gl.num_programs(0) - 1, scope):
        publish_counts(ctx, layout)
    routed = now(ctx)
    record(ctx, COMMUNICATE, 0, ROUTE, 0, 0, begin, begin, routed)
    event = gl.to_tensor(2)
    if spec.unpacks:
        # the first, whether it has rows or not: the others' counts are on their way
        event = unpack_expert(ctx, gl.to_tensor(0), event)
        routed = now(ctx)
    rows = rows_of_experts(ctx, layout)
    first, blocks = first_blocks(rows, spec.block_m)
    if gl.program_id(0) == 0:
        gl.store(control + CONTROL_USED_BLOCKS + ctx.counter_set, blocks)
    counted = now(ctx)
    record(ctx, COMMUNICATE, 1, WAIT_COUNTS, 0, 0, routed, routed, counted)
    event = pull(ctx, rows, first, blocks, gl.to_tensor(1), event)
    clear_other_set(ctx, layout)  # last, since rows are waited for
    return event
