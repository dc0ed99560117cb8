"""Staging: one launch before the mega-kernel writes a call's inputs into the symmetric buffer.

bf16 rows are quantised on the way, by the rules of :mod:`megamoe.formats`, bit for bit; rows that
come quantised are copied.  Columns past `hidden` are never written: they are zero since the buffer
was set up.  The scale of a block of zeros becomes code 0, so that it cannot set its token's scale.
"""

from megamoe.kernel.compat import gl, gluon

ROWS = gl.constexpr(4)  # one a warp
COLUMNS = gl.constexpr(512)  # of each row that are in flight at once
CHUNK = gl.constexpr(128)
INFINITE = gl.constexpr(0x7F800000)  # bits of fp32
NAN = gl.constexpr(0x7FC00000)


@gluon.jit
def region(buffer, OFFSET: gl.constexpr, dtype: gl.constexpr):
    return (buffer + OFFSET).to(gl.pointer_type(dtype), bitcast=True)


@gluon.jit
def stage_routing(buffer, topk_idx, topk_weights, tokens, spec: gl.constexpr):
    """Copy expert ids as int32, and router weights."""
    i = gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    ids = region(buffer, spec.topk_idx, gl.int32)
    weights = region(buffer, spec.topk_weights, gl.float32)
    entries = tokens * spec.topk
    for start in range(gl.program_id(0) * CHUNK, entries, gl.num_programs(0) * CHUNK):
        entry = start + i
        exists = entry < entries
        expert = gl.load(topk_idx + entry, mask=exists, other=0)
        if spec.wide_ids:
            # an id that int32 cannot hold must not become a valid one
            expert = gl.minimum(gl.maximum(expert, -2147483648), 2147483647).to(gl.int32)
        gl.store(ids + entry, expert, mask=exists)
        weight = gl.load(topk_weights + entry, mask=exists, other=0.0)
        gl.store(weights + entry, weight, mask=exists)


@gluon.jit
def magnitude_bits(value):
    """Bits of |value| (fp32), and whether it is finite."""
    bits = value.to(gl.int32, bitcast=True) & 0x7FFFFFFF
    return bits, bits < INFINITE


@gluon.jit
def exponent_of(bits):
    """The smallest e >= -126 with amax <= 448 * 2^e, for the bits of a finite amax >= 0."""
    above = ((bits & 0x7FFFFF) > 0x600000).to(gl.int32)
    return gl.maximum((bits >> 23) - 135 + above, -126)


@gluon.jit
def power(e):
    """2^e as fp32, for e in -126..127."""
    return ((e + 127) << 23).to(gl.float32, bitcast=True)


@gluon.jit
def encode(scaled, finite):
    """e4m3; NaN and Inf of the input become NaN."""
    bits = gl.where(finite, scaled.to(gl.int32, bitcast=True), NAN)
    return bits.to(gl.float32, bitcast=True).to(gl.float8e4nv)


@gluon.jit
def stage_blocks(buffer, x, x_scale, tokens, spec: gl.constexpr):
    """Rows with a scale for each block: bf16 is quantised; for UE8M0 also rows that are already
    e4m3, whose codes depend on their values.
    """
    VECTOR: gl.constexpr = spec.vector
    G: gl.constexpr = spec.block
    GROUPS: gl.constexpr = COLUMNS // G
    layout: gl.constexpr = gl.BlockedLayout(
        [1, 1, 8], [1, 256 // G, G // 8], [gl.num_warps(), 1, 1], [2, 1, 0]
    )
    tile: gl.constexpr = gl.SliceLayout(2, layout)
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, tile))
    g = gl.arange(0, GROUPS, layout=gl.SliceLayout(0, tile))[None, :]
    c = gl.arange(0, G, layout=gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]
    values = region(buffer, spec.x, gl.float8e4nv)
    chunks: gl.constexpr = (spec.hidden + COLUMNS - 1) // COLUMNS
    units = (tokens + (ROWS - 1)) // ROWS * chunks
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        token = unit // chunks * ROWS + r
        row = token.to(gl.int64)
        group = unit % chunks * GROUPS + g
        column = (group * G)[:, :, None] + c
        real = (token < tokens)[:, None] & (group * G < spec.hidden)
        inside = real[:, :, None] & (column < spec.hidden)
        source = gl.multiple_of(x + row * spec.hidden, VECTOR)[:, None][:, :, None] + column
        target = gl.multiple_of(values + row * spec.padded_hidden, 16)[:, None]
        target = target[:, :, None] + column
        if spec.quantised:
            value = gl.load(source, mask=inside, other=0)
            given = region(x_scale, 0, gl.uint8) + row * (4 * spec.scale_columns)
            code = gl.load(given[:, None] + group, mask=real, other=0)
            empty = gl.max((value & 0x7F).to(gl.int32), 2) == 0
            gl.store(target.to(gl.pointer_type(gl.uint8), bitcast=True), value, mask=inside)
            store_codes(buffer, row, group, gl.where(empty, 0, code.to(gl.int32)), real, spec)
        else:
            value = gl.load(source, mask=inside, other=0.0).to(gl.float32)
            bits, finite = magnitude_bits(value)
            amax = gl.max(gl.where(finite, bits, 0), 2)
            if spec.x_scales == "ue8m0_32":
                e = exponent_of(amax)
                empty = gl.max(bits, 2) == 0
                gl.store(target, encode(value * power(-e)[:, :, None], finite), mask=inside)
                store_codes(buffer, row, group, gl.where(empty, 0, e + 127), real, spec)
            else:
                # divided as IEEE says: the default division is not exact
                scale = gl.div_rn(amax.to(gl.float32, bitcast=True), amax * 0.0 + 448.0)
                scale = gl.maximum(scale, 1.1754943508222875e-38)
                quotient = gl.div_rn(value, value * 0.0 + scale[:, :, None])
                gl.store(target, encode(quotient, finite), mask=inside)
                scales = region(buffer, spec.x_scale, gl.float32)
                where = scales + row * (spec.padded_hidden // 128)
                gl.store(where[:, None] + group, scale, mask=real)


@gluon.jit
def store_codes(buffer, row, group, code, real, spec: gl.constexpr):
    codes = region(buffer, spec.x_scale, gl.uint8) + row * (spec.padded_hidden // 32)
    gl.store(codes[:, None] + group, code.to(gl.uint8), mask=real)


@gluon.jit
def stage_token_scale(buffer, x, tokens, spec: gl.constexpr):
    """bf16 rows quantised with one scale a token: a pass to find it, a pass to use it."""
    VECTOR: gl.constexpr = spec.vector
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    line: gl.constexpr = gl.SliceLayout(1, layout)
    r = gl.arange(0, ROWS, layout=line)
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    values = region(buffer, spec.x, gl.float8e4nv)
    scales = region(buffer, spec.x_scale, gl.float32)
    for unit in range(gl.program_id(0), (tokens + (ROWS - 1)) // ROWS, gl.num_programs(0)):
        token = unit * ROWS + r
        real = token < tokens
        row = token.to(gl.int64)
        source = gl.multiple_of(x + row * spec.hidden, VECTOR)[:, None]
        target = gl.multiple_of(values + row * spec.padded_hidden, 16)[:, None]
        top = gl.zeros((ROWS,), gl.int32, line)
        for start in range(0, spec.hidden, COLUMNS):
            inside = real[:, None] & (start + c < spec.hidden)
            value = gl.load(source + (start + c), mask=inside, other=0.0).to(gl.float32)
            bits, finite = magnitude_bits(value)
            top = gl.maximum(top, gl.max(gl.where(finite, bits, 0), 1))
        e = exponent_of(top)
        gl.store(scales + token, power(e), mask=real)
        for start in range(0, spec.hidden, COLUMNS):
            inside = real[:, None] & (start + c < spec.hidden)
            value = gl.load(source + (start + c), mask=inside, other=0.0).to(gl.float32)
            bits, finite = magnitude_bits(value)
            scaled = encode(value * power(-e)[:, None], finite)
            gl.store(target + (start + c), scaled, mask=inside)


@gluon.jit
def stage_copy(buffer, x, x_scale, tokens, spec: gl.constexpr):
    """Rows as they are, in 4-byte words, and their fp32 scales if they have any."""
    VECTOR: gl.constexpr = spec.vector
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [gl.num_warps(), 1], [1, 0])
    r = gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, COLUMNS, layout=gl.SliceLayout(0, layout))[None, :]
    words: gl.constexpr = spec.hidden * spec.x_bytes // 4
    padded: gl.constexpr = spec.padded_hidden * spec.x_bytes // 4
    given = region(x, 0, gl.int32)
    rows = region(buffer, spec.x, gl.int32)
    chunks: gl.constexpr = (words + COLUMNS - 1) // COLUMNS
    units = (tokens + (ROWS - 1)) // ROWS * chunks
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        token = unit // chunks * ROWS + r
        row = token.to(gl.int64)
        column = unit % chunks * COLUMNS + c
        inside = (token < tokens)[:, None] & (column < words)
        source = gl.multiple_of(given + row * words, VECTOR)[:, None] + column
        target = gl.multiple_of(rows + row * padded, 16)[:, None] + column
        gl.store(target, gl.load(source, mask=inside, other=0), mask=inside)
    if spec.scale_columns > 0:
        wire: gl.constexpr = spec.wire_scale_columns
        scales = region(buffer, spec.x_scale, gl.float32)
        i = gl.arange(0, CHUNK, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        count = tokens * spec.scale_columns
        for start in range(gl.program_id(0) * CHUNK, count, gl.num_programs(0) * CHUNK):
            entry = start + i
            scale = gl.load(x_scale + entry, mask=entry < count, other=0.0)
            place = entry // spec.scale_columns * wire + entry % spec.scale_columns
            gl.store(scales + place, scale, mask=entry < count)


@gluon.jit(do_not_specialize=["x", "x_scale", "topk_idx", "topk_weights", "tokens"])
def stage_kernel(buffer, x, x_scale, topk_idx, topk_weights, tokens, spec: gl.constexpr):
    """Write `tokens` rows of a call's inputs into `buffer` (bytes).

    x [tokens, hidden]: bf16, or e4m3 as bytes where `spec.quantised`; x_scale, topk_idx,
    topk_weights as in :func:`~megamoe.config.validate_inputs`; x_scale is any pointer where there
    is none.
    """
    stage_routing(buffer, topk_idx, topk_weights, tokens, spec)
    if spec.blocks_in_pass:
        stage_blocks(buffer, x, x_scale, tokens, spec)
    elif (spec.x_scales == "token") and (not spec.quantised):
        stage_token_scale(buffer, x, tokens, spec)
    else:
        stage_copy(buffer, x, x_scale, tokens, spec)
