"""The two loader warps: weights and tokens, stage by stage, through TMA into the ring of operands.

They walk the same tasks and the same stages; a stage is full when the bytes of both have landed.
"""

from megamoe.kernel.compat import gl, gluon, mbarrier, tma_load
from megamoe.kernel.schedule import DONE, LINEAR1, take_task
from megamoe.kernel.sync import PHASE_L1, PHASE_ROWS, fence_async_proxy, wait_gpu
from megamoe.kernel.trace import LOAD_TOKENS, LOAD_WEIGHTS, now, record


@gluon.jit
def load_stage(desc, row, column, ring, rings, step, BYTES: gl.constexpr, STAGES: gl.constexpr):
    stage = step % STAGES
    mbarrier.wait(rings.empty.index(stage), ((step // STAGES) & 1) ^ 1)
    mbarrier.expect(rings.full.index(stage), BYTES)
    tma_load(desc, [row, column], rings.full.index(stage), ring.index(stage))


@gluon.jit
def load_weights_role(ctx, rings):
    """One warp.  Weights depend on nobody: it runs ahead as far as the ring allows."""
    spec: gl.constexpr = ctx.spec
    columns: gl.constexpr = ctx.w1.block_shape[1]
    step = 0
    i = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        begin = now(ctx)
        if kind == LINEAR1:
            row = expert * (2 * spec.padded_intermediate) + tile * spec.block_n
            for k in range(spec.padded_hidden // spec.block_k):
                load_stage(ctx.w1, row, k * columns, rings.w, rings, step, spec.stage_bytes_w, spec.stages)
                step += 1
        else:
            row = expert * spec.padded_hidden + tile * spec.block_n
            for k in range(spec.padded_intermediate // spec.block_k):
                load_stage(ctx.w2, row, k * columns, rings.w, rings, step, spec.stage_bytes_w, spec.stages)
                step += 1
        record(ctx, LOAD_WEIGHTS, i, kind, block, tile, begin, begin, now(ctx))
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)


@gluon.jit
def load_tokens_role(ctx, rings):
    """One warp.  Waits for the block's rows (L1) or for its L1 tiles (L2), then loads them from the pool."""
    spec: gl.constexpr = ctx.spec
    arrived = ctx.block_counters(spec.offset.arrived)
    l1_done = ctx.block_counters(spec.offset.l1_done)
    l1_signals: gl.constexpr = spec.l1_tiles * spec.math_partitions
    step = 0
    i = 0
    kind, block, tile, expert, valid = take_task(rings, i)
    while kind != DONE:
        begin = now(ctx)
        row = (block % spec.ring_blocks) * spec.block_m
        if kind == LINEAR1:
            seen = wait_gpu(arrived + block, spec.block_m, ctx.status(), PHASE_ROWS, block, spec.timeout_ns)
            fence_async_proxy(seen)
            ready = now(ctx)
            for k in range(spec.padded_hidden // spec.block_k):
                load_stage(ctx.pool_x, row, k * spec.block_k, rings.x, rings, step, spec.stage_bytes_x, spec.stages)
                step += 1
        else:
            if spec.phases == "fused":
                seen = wait_gpu(l1_done + block, l1_signals, ctx.status(), PHASE_L1, block, spec.timeout_ns)
                fence_async_proxy(seen)
            ready = now(ctx)
            for k in range(spec.padded_intermediate // spec.block_k):
                load_stage(ctx.pool_h, row, k * spec.block_k, rings.x, rings, step, spec.stage_bytes_x, spec.stages)
                step += 1
        record(ctx, LOAD_TOKENS, i, kind, block, tile, begin, ready, now(ctx))
        i += 1
        kind, block, tile, expert, valid = take_task(rings, i)
