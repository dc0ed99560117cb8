"""What a partition is given: the launch (:class:`Context`) and the CTA's rings in shared memory
(:class:`Rings`).
"""

from megamoe import plan
from megamoe.kernel.compat import aggregate, gl, gluon, mbarrier, tma

TASK_SLOTS = gl.constexpr(4)
TASK_WORDS = gl.constexpr(8)
MATH_PARTITIONS = gl.constexpr(plan.MATH_PARTITIONS)


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
    w1_factor: tma.tensor_descriptor
    w2_factor: tma.tensor_descriptor
    # where dispatch unpacks MXFP4; else not used
    w1_codes: gl.tensor  # int8 pointers
    w2_codes: gl.tensor
    w1_offset: gl.tensor  # int32 pointers
    w2_offset: gl.tensor
    unpacked: gl.tensor  # float8 pointer: all experts, w1 then w2
    w1_scale: gl.tensor
    w2_scale: gl.tensor

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
        self.w1_factor = w1_factor
        self.w2_factor = w2_factor
        self.w1_codes = w1_codes
        self.w2_codes = w2_codes
        self.w1_offset = w1_offset
        self.w2_offset = w2_offset
        self.unpacked = unpacked

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
    full: (
        gl.shared_memory_descriptor
    )  # [stages]: both loaders' bytes have landed, or the expander's are stored
    empty: gl.shared_memory_descriptor  # [stages]: every math partition has read them
    # where weights land: a ring of their own if there is an expander to read it, else w itself
    packed: gl.shared_memory_descriptor  # [packed stages, block_n, bytes of packed_k]
    # what 128 of K of a weight row need beside their values, in the same stage: fp8_block scales,
    # exponent offsets of mxfp4
    factors: gl.shared_memory_descriptor  # [packed stages, packed_k / 128, block_n]
    packed_full: gl.shared_memory_descriptor
    packed_empty: gl.shared_memory_descriptor
    tasks: gl.shared_memory_descriptor  # [slots, words]
    task_full: gl.shared_memory_descriptor
    task_empty: gl.shared_memory_descriptor
    tile_done: (
        gl.shared_memory_descriptor
    )  # [slots]: every math partition has stored its part of the task's tile
    # of L1's output with weights first, where two partitions share a scale; else not used
    amax: gl.shared_memory_descriptor  # [2 x math partitions, block_m]
    amax_full: gl.shared_memory_descriptor  # [1]
    # first half of an activated L1 tile, where registers do not hold it; else not used
    aside: gl.shared_memory_descriptor  # [math partitions, 64 tokens, 64 columns]

    @gluon.constexpr_function
    def __init__(
        self,
        w,
        x,
        x_scale,
        full,
        empty,
        packed,
        factors,
        packed_full,
        packed_empty,
        tasks,
        task_full,
        task_empty,
        tile_done,
        amax,
        amax_full,
        aside,
    ):
        self.w = w
        self.x = x
        self.x_scale = x_scale
        self.full = full
        self.empty = empty
        self.packed = packed
        self.factors = factors
        self.packed_full = packed_full
        self.packed_empty = packed_empty
        self.tasks = tasks
        self.task_full = task_full
        self.task_empty = task_empty
        self.tile_done = tile_done
        self.amax = amax
        self.amax_full = amax_full
        self.aside = aside


@gluon.jit
def allocate_rings(ctx):
    spec: gl.constexpr = ctx.spec
    stages: gl.constexpr = spec.stages
    block_m: gl.constexpr = spec.block_m
    block_n: gl.constexpr = spec.block_n
    block_k: gl.constexpr = spec.block_k
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    barriers: gl.constexpr = mbarrier.MBarrierLayout()
    if spec.expanders > 0:
        # of one type and width with the tokens: one swizzle fits both
        w = gl.allocate_shared_memory(
            ctx.pool_x.dtype, [stages, block_n, block_k], ctx.pool_x.layout
        )
    else:
        row: gl.constexpr = ctx.w1.block_shape[1]
        w = gl.allocate_shared_memory(ctx.w1.dtype, [stages, block_n, row], ctx.w1.layout)
    x = gl.allocate_shared_memory(ctx.pool_x.dtype, [stages, block_m, block_k], ctx.pool_x.layout)
    scale_rows: gl.constexpr = spec.stage_scale_rows
    x_scale = gl.allocate_shared_memory(
        gl.float32, [stages, scale_rows, block_m], ctx.pool_h_scale.layout
    )
    full = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    empty = gl.allocate_shared_memory(gl.int64, [stages, 1], barriers)
    packed = w
    packed_full = full
    packed_empty = empty
    landing: gl.constexpr = spec.packed_stages
    if spec.expanders > 0:
        columns: gl.constexpr = ctx.w1.block_shape[1]
        packed = gl.allocate_shared_memory(ctx.w1.dtype, [landing, block_n, columns], ctx.w1.layout)
        packed_full = gl.allocate_shared_memory(gl.int64, [landing, 1], barriers)
        packed_empty = gl.allocate_shared_memory(gl.int64, [landing, 1], barriers)
        for i in gl.static_range(landing):
            mbarrier.init(packed_full.index(i), count=1)
            mbarrier.init(packed_empty.index(i), count=1)
    factors = x_scale  # not used
    if spec.factor_rows > 0:
        factors = gl.allocate_shared_memory(
            ctx.w1_factor.dtype, [landing, spec.factor_rows, block_n], ctx.w1_factor.layout
        )
    tasks = gl.allocate_shared_memory(gl.int32, [TASK_SLOTS, TASK_WORDS], plain)
    task_full = gl.allocate_shared_memory(gl.int64, [TASK_SLOTS, 1], barriers)
    task_empty = gl.allocate_shared_memory(gl.int64, [TASK_SLOTS, 1], barriers)
    tile_done = gl.allocate_shared_memory(gl.int64, [TASK_SLOTS, 1], barriers)
    # A barrier that no role uses would be initialised and then its memory given to something else,
    # without being invalidated: with more than 32 barriers in a CTA the hardware was seen to write
    # its state back there.  So where there is no use there is no barrier.
    amax = x_scale
    amax_full = tile_done
    if spec.exchanges_maxima:
        amax = gl.allocate_shared_memory(gl.float32, [2 * MATH_PARTITIONS, block_m], plain)
        amax_full = gl.allocate_shared_memory(gl.int64, [1, 1], barriers)
        mbarrier.init(amax_full.index(0), count=MATH_PARTITIONS)
    aside = x_scale
    if spec.sets_aside:
        # no two rows of eight in one bank
        swizzled: gl.constexpr = gl.SwizzledSharedLayout(2, 1, 8, [1, 0])
        aside = gl.allocate_shared_memory(gl.float32, [MATH_PARTITIONS, 64, 64], swizzled)
    for i in gl.static_range(stages):
        mbarrier.init(full.index(i), count=2)
        mbarrier.init(empty.index(i), count=MATH_PARTITIONS)
    for i in gl.static_range(TASK_SLOTS):
        mbarrier.init(task_full.index(i), count=1)
        mbarrier.init(task_empty.index(i), count=MATH_PARTITIONS + spec.expanders + 3)
        mbarrier.init(tile_done.index(i), count=MATH_PARTITIONS)
    return Rings(
        w,
        x,
        x_scale,
        full,
        empty,
        packed,
        factors,
        packed_full,
        packed_empty,
        tasks,
        task_full,
        task_empty,
        tile_done,
        amax,
        amax_full,
        aside,
    )
