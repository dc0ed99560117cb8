"""What a partition is given: the launch (:class:`Context`) and the CTA's rings in shared memory
(:class:`Rings`).
"""

from megamoe.kernel.compat import aggregate, gl, gluon, mbarrier, tma

TASK_SLOTS = gl.constexpr(4)
TASK_WORDS = gl.constexpr(8)


@aggregate
class Context:
    """One launch on one rank; `spec` is the compile-time :class:`~megamoe.plan.KernelSpec`."""

    spec: gl.constexpr
    buffer: gl.tensor  # int8 pointer: this rank's symmetric buffer
    peers: gl.tensor  # int64 pointer: byte distance from this rank's buffer to each rank's
    rank: gl.tensor
    tokens: gl.tensor
    epoch: gl.tensor
    counter_set: gl.tensor
    y: gl.tensor  # bfloat16 pointer [tokens, hidden]
    w1: tma.tensor_descriptor
    w2: tma.tensor_descriptor
    pool_x: tma.tensor_descriptor
    pool_h: tma.tensor_descriptor
    pool_x_scale: tma.tensor_descriptor
    pool_h_scale: tma.tensor_descriptor
    w1_scale: gl.tensor
    w2_scale: gl.tensor
    w1_offset: gl.tensor
    w2_offset: gl.tensor

    @gluon.constexpr_function
    def __init__(
        self,
        spec,
        buffer,
        peers,
        rank,
        tokens,
        epoch,
        counter_set,
        y,
        w1,
        w2,
        pool_x,
        pool_h,
        pool_x_scale,
        pool_h_scale,
        w1_scale,
        w2_scale,
        w1_offset,
        w2_offset,
    ):
        self.spec = gl.constexpr(spec)
        self.buffer = buffer
        self.peers = peers
        self.rank = rank
        self.tokens = tokens
        self.epoch = epoch
        self.counter_set = counter_set
        self.y = y
        self.w1 = w1
        self.w2 = w2
        self.pool_x = pool_x
        self.pool_h = pool_h
        self.pool_x_scale = pool_x_scale
        self.pool_h_scale = pool_h_scale
        self.w1_scale = w1_scale
        self.w2_scale = w2_scale
        self.w1_offset = w1_offset
        self.w2_offset = w2_offset

    @gluon.jit
    def region(self, OFFSET: gl.constexpr, dtype: gl.constexpr):
        """Pointer to a region of this rank's buffer."""
        return (self.buffer + OFFSET).to(gl.pointer_type(dtype), bitcast=True)

    @gluon.jit
    def peer_region(self, ranks, OFFSET: gl.constexpr, dtype: gl.constexpr):
        """Pointers to a region of the buffers of `ranks` (an int32 tensor)."""
        if self.spec.ranks == 1:
            base = self.buffer + ranks.to(gl.int64) * 0
        else:
            base = self.buffer + gl.load(self.peers + ranks)
        return (base + OFFSET).to(gl.pointer_type(dtype), bitcast=True)

    @gluon.jit
    def block_counters(self, OFFSET: gl.constexpr):
        """A per-block counter array of this call's set."""
        base = self.buffer + OFFSET + self.counter_set * self.spec.offset.block_set
        return base.to(gl.pointer_type(gl.int32), bitcast=True)

    @gluon.jit
    def status(self):
        return self.region(self.spec.offset.status, gl.int32)


@aggregate
class Rings:
    """Shared memory: operand stages, task slots, and the exchange of row maxima between two math
    partitions.
    """

    w: gl.shared_memory_descriptor  # [stages, block_n, block_k]
    x: gl.shared_memory_descriptor  # [stages, block_m, block_k]
    x_scale: gl.shared_memory_descriptor  # [stages, scale rows of a stage, block_m]
    full: gl.shared_memory_descriptor  # [stages]: both loaders' bytes have landed
    empty: gl.shared_memory_descriptor  # [stages]: every math partition has read them
    tasks: gl.shared_memory_descriptor  # [slots, words]
    task_full: gl.shared_memory_descriptor
    task_empty: gl.shared_memory_descriptor
    tile_done: (
        gl.shared_memory_descriptor
    )  # [slots]: every math partition has stored its part of the task's tile
    amax: gl.shared_memory_descriptor  # [2 x math partitions, block_m]
    amax_full: gl.shared_memory_descriptor  # [math partitions / 2]

    @gluon.constexpr_function
    def __init__(
        self, w, x, x_scale, full, empty, tasks, task_full, task_empty, tile_done, amax, amax_full
    ):
        self.w = w
        self.x = x
        self.x_scale = x_scale
        self.full = full
        self.empty = empty
        self.tasks = tasks
        self.task_full = task_full
        self.task_empty = task_empty
        self.tile_done = tile_done
        self.amax = amax
        self.amax_full = amax_full


@gluon.jit
def allocate_rings(ctx):
    spec: gl.constexpr = ctx.spec
    stages: gl.constexpr = spec.stages
    partitions: gl.constexpr = spec.math_partitions
    block_m: gl.constexpr = spec.block_m
    block_n: gl.constexpr = spec.block_n
    block_k: gl.constexpr = spec.block_k
    columns: gl.constexpr = ctx.w1.block_shape[1]
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    w = gl.allocate_shared_memory(ctx.w1.dtype, [stages, block_n, columns], ctx.w1.layout)
    x = gl.allocate_shared_memory(ctx.pool_x.dtype, [stages, block_m, block_k], ctx.pool_x.layout)
    scale_rows: gl.constexpr = spec.stage_scale_rows
    x_scale = gl.allocate_shared_memory(
        gl.float32, [stages, scale_rows, block_m], ctx.pool_h_scale.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    tasks = gl.allocate_shared_memory(gl.int32, [TASK_SLOTS, TASK_WORDS], plain)
    task_full = gl.allocate_shared_memory(gl.int64, [TASK_SLOTS, 1], barriers)
    task_empty = gl.allocate_shared_memory(gl.int64, [TASK_SLOTS, 1], barriers)
    tile_done = gl.allocate_shared_memory(gl.int64, [TASK_SLOTS, 1], barriers)
    amax = gl.allocate_shared_memory(gl.float32, [2 * partitions, block_m], plain)
    amax_full = gl.allocate_shared_memory(gl.int64, [partitions // 2, 1], barriers)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=partitions)
    for i in gl.static_range(TASK_SLOTS):
        mbarrier.init(task_full.index(i), count=1)
        mbarrier.init(task_empty.index(i), count=partitions + 3)
        mbarrier.init(tile_done.index(i), count=partitions)
    for i in gl.static_range(partitions // 2):
        mbarrier.init(amax_full.index(i), count=2)
    return Rings(
        w, x, x_scale, full, empty, tasks, task_full, task_empty, tile_done, amax, amax_full
    )
