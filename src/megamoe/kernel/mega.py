"""The mega-kernel: one launch a forward.

    default partition      math 0
    workers                math 1 | dispatch, then combine | expand (MXFP4, wide tiles) |
    load weights | load tokens | schedule | signal

`spec.phases` cuts the same roles into the launches of the unfused chain; "fused" runs them all.
"""

from megamoe.kernel.activation import power_of_two_scale, swiglu
from megamoe.kernel.combine import combine_role
from megamoe.kernel.compat import cta_barrier, fence_async_shared, gl, gluon
from megamoe.kernel.context import MATH_PARTITIONS, Context, allocate_rings
from megamoe.kernel.dispatch import CONTROL_EPOCH, dispatch_role
from megamoe.kernel.epilogue import H_GROUP
from megamoe.kernel.expand import expand_role
from megamoe.kernel.linear import math_role
from megamoe.kernel.load import load_tokens_role, load_weights_role
from megamoe.kernel.schedule import block_owner, first_blocks, rows_of_experts, schedule_role
from megamoe.kernel.signal import signal_role
from megamoe.kernel.trace import COMMUNICATE


@gluon.jit
def communicate_role(ctx):
    """Four warps: dispatch at the start, combine as tokens come back, while the math runs."""
    spec: gl.constexpr = ctx.spec
    event = 0
    if (spec.phases == "fused") | (spec.phases == "dispatch"):
        event = dispatch_role(ctx)
    if spec.phases == "fused":
        combine_role(ctx, 0, MATH_PARTITIONS + 1, COMMUNICATE, event)
    if spec.phases == "combine":
        combine_role(ctx, 0, 1, COMMUNICATE, event)


@gluon.jit
def make_context(
    spec: gl.constexpr,
    buffer,
    peers,
    rank,
    tokens,
    y,
    w1,
    w2,
    pool_x,
    pool_h,
    pool_x_scale,
    pool_h_scale,
    w1_factor,
    w2_factor,
    w1_codes,
    w2_codes,
    w1_offset,
    w2_offset,
    unpacked,
    w1_scale,
    w2_scale,
):
    """The call's number comes from the buffer, so that a captured launch can be replayed."""
    control = (buffer + spec.offset.control).to(gl.pointer_type(gl.int32), bitcast=True)
    epoch = gl.load(control + CONTROL_EPOCH)
    if (spec.phases == "fused") | (spec.phases == "dispatch"):
        # the launches of the chain after dispatch belong to the call that dispatch has begun
        epoch = (epoch.to(gl.int64) + 1).to(gl.int32)  # wraps after 2^31 calls
    return Context(
        spec,
        buffer,
        peers,
        rank,
        tokens,
        epoch,
        epoch & 1,
        y,
        w1,
        w2,
        pool_x,
        pool_h,
        pool_x_scale,
        pool_h_scale,
        w1_factor,
        w2_factor,
        w1_codes,
        w2_codes,
        w1_offset,
        w2_offset,
        unpacked,
        w1_scale,
        w2_scale,
    )


@gluon.jit(do_not_specialize=["rank", "tokens"])
def moe_kernel(
    buffer,
    peers,
    rank,
    tokens,
    y,
    w1,
    w2,
    pool_x,
    pool_h,
    pool_x_scale,
    pool_h_scale,
    w1_factor,
    w2_factor,
    w1_codes,
    w2_codes,
    w1_offset,
    w2_offset,
    unpacked,
    w1_scale,
    w2_scale,
    spec: gl.constexpr,
):
    """Arguments as in :class:`~megamoe.kernel.context.Context`."""
    ctx = make_context(
        spec,
        buffer,
        peers,
        rank,
        tokens,
        y,
        w1,
        w2,
        pool_x,
        pool_h,
        pool_x_scale,
        pool_h_scale,
        w1_factor,
        w2_factor,
        w1_codes,
        w2_codes,
        w1_offset,
        w2_offset,
        unpacked,
        w1_scale,
        w2_scale,
    )
    rings = allocate_rings(ctx)
    fence_async_shared()
    cta_barrier()
    math: gl.constexpr = spec.math_registers
    load: gl.constexpr = spec.load_registers
    communicate: gl.constexpr = spec.dispatch_registers
    expand: gl.constexpr = spec.expand_registers
    if spec.expanders == 0:
        gl.warp_specialize(
            [
                (math_role, (ctx, rings, 0)),
                (math_role, (ctx, rings, 1)),
                (communicate_role, (ctx,)),
                (load_weights_role, (ctx, rings)),
                (load_tokens_role, (ctx, rings)),
                (schedule_role, (ctx, rings)),
                (signal_role, (ctx, rings)),
            ],
            [4, 4, 1, 1, 1, 1],
            [math, communicate, load, load, load, load],
        )
    else:
        gl.warp_specialize(
            [
                (math_role, (ctx, rings, 0)),
                (math_role, (ctx, rings, 1)),
                (communicate_role, (ctx,)),
                (expand_role, (ctx, rings)),
                (load_weights_role, (ctx, rings)),
                (load_tokens_role, (ctx, rings)),
                (schedule_role, (ctx, rings)),
                (signal_role, (ctx, rings)),
            ],
            [4, 4, 4, 1, 1, 1, 1],
            [math, communicate, expand, load, load, load, load],
        )


@gluon.jit(do_not_specialize=["rank", "tokens"])
def communicate_kernel(
    buffer,
    peers,
    rank,
    tokens,
    y,
    w1,
    w2,
    pool_x,
    pool_h,
    pool_x_scale,
    pool_h_scale,
    w1_factor,
    w2_factor,
    w1_codes,
    w2_codes,
    w1_offset,
    w2_offset,
    unpacked,
    w1_scale,
    w2_scale,
    spec: gl.constexpr,
):
    """Chain only: dispatch, or combine, alone in a launch."""
    ctx = make_context(
        spec,
        buffer,
        peers,
        rank,
        tokens,
        y,
        w1,
        w2,
        pool_x,
        pool_h,
        pool_x_scale,
        pool_h_scale,
        w1_factor,
        w2_factor,
        w1_codes,
        w2_codes,
        w1_offset,
        w2_offset,
        unpacked,
        w1_scale,
        w2_scale,
    )
    communicate_role(ctx)


@gluon.jit(do_not_specialize=["rank", "tokens"])
def activation_kernel(
    buffer,
    peers,
    rank,
    tokens,
    y,
    w1,
    w2,
    pool_x,
    pool_h,
    pool_x_scale,
    pool_h_scale,
    w1_factor,
    w2_factor,
    w1_codes,
    w2_codes,
    w1_offset,
    w2_offset,
    unpacked,
    w1_scale,
    w2_scale,
    spec: gl.constexpr,
):
    """Chain only: SwiGLU and quantisation of the stored L1 accumulators, 16 pool rows by one scale
    group at a time.
    """
    ctx = make_context(
        spec,
        buffer,
        peers,
        rank,
        tokens,
        y,
        w1,
        w2,
        pool_x,
        pool_h,
        pool_x_scale,
        pool_h_scale,
        w1_factor,
        w2_factor,
        w1_codes,
        w2_codes,
        w1_offset,
        w2_offset,
        unpacked,
        w1_scale,
        w2_scale,
    )
    warps: gl.constexpr = gl.num_warps()
    experts: gl.constexpr = gl.BlockedLayout([1], [32], [warps], [0])
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    rows = rows_of_experts(ctx, experts)
    first, blocks = first_blocks(rows, spec.block_m)
    groups: gl.constexpr = spec.padded_intermediate // H_GROUP
    parts: gl.constexpr = spec.block_m // 16
    r = gl.arange(0, 16, layout=gl.SliceLayout(1, layout))
    c = gl.arange(0, H_GROUP, layout=gl.SliceLayout(0, layout))
    acc = ctx.region(spec.offset.l1_acc, gl.float32)
    weights = ctx.region(spec.offset.pool_weight, gl.float32)
    for unit in range(gl.program_id(0), blocks * parts * groups, gl.num_programs(0)):
        group = unit % groups
        part = unit // groups
        expert, valid = block_owner(
            part // parts, rows, first, spec.block_m, experts, spec.expert_lanes
        )
        row = part * 16 + r
        real = (part % parts) * 16 + r < valid
        column = group * H_GROUP + c
        source = acc + row.to(gl.int64)[:, None] * (2 * spec.padded_intermediate)
        source += (16 * (column // 8) + column % 8)[None, :]
        gate = gl.load(source, mask=real[:, None], other=0.0)
        up = gl.load(source + 8, mask=real[:, None], other=0.0)
        weight = gl.load(weights + row, mask=real, other=0.0)
        out = swiglu(gate, up, weight[:, None], spec.clamp)
        target = row.to(gl.int64)[:, None] * spec.padded_intermediate + column[None, :]
        if spec.recipe == "bf16":
            gl.store(
                ctx.region(spec.offset.pool_h, gl.bfloat16) + target,
                out.to(gl.bfloat16),
                mask=real[:, None],
            )
        else:
            scale, inverse = power_of_two_scale(gl.max(gl.maximum(out, -out), 1))
            quantised = (out * inverse[:, None]).to(gl.float8e4nv)
            gl.store(
                ctx.region(spec.offset.pool_h, gl.float8e4nv) + target,
                quantised,
                mask=real[:, None],
            )
            scales = ctx.region(spec.offset.pool_h_scale, gl.float32)
            gl.store(scales + group * spec.ring_rows + row, scale, mask=real)
