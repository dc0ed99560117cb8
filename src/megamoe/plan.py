"""The plan of one forward: symmetric buffer regions, tile policy, ring size, kernel constants.

Pure functions of a :class:`~megamoe.config.MoEConfig`; nothing is allocated and no device is
asked.  Every byte of the buffer is in one table (:attr:`Plan.regions`); the kernel gets its
offsets from :meth:`Plan.spec`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from math import prod
from pathlib import Path

from megamoe.config import H_GROUP, MegaMoEConfigError, MoEConfig

# Properties of a KernelSpec follow from this text, but Triton names a compiled kernel by the fields
RULES = sha256(Path(__file__).read_bytes()).hexdigest()[:12]
K_GROUP = 128  # K columns between two promotions of the FP8 accumulator to fp32
BLOCK_MS = (16, 32, 64, 128)
# (most rows an average expert has, block_m): the smallest tile that holds them; what others would
# take is timed by benchmarks/search_tiles.py
TILES = ((16, 16), (32, 32), (64, 64), (128, 128), (float("inf"), 128))
WIDE_ROWS = 128  # with more, wide tiles take 256 weight rows at a time where registers allow it
UNPACK_ROWS = 768  # with more, MXFP4 codes are unpacked once, in memory, not once for each block
MATH_PARTITIONS = 2  # warpgroups that share a tile
PART_ROWS = 64  # M side of a math partition: weight rows or tokens
HALF_N = PART_ROWS * MATH_PARTITIONS  # weight rows of one accumulator of all partitions
L1_ROWS = 2 * H_GROUP  # weight rows of an L1 tile: gate and up of one scale group of its output
SETS = 2  # counters exist twice: one set in use by this call, one being cleared for the next
ALIGN = 1024  # bytes; TMA needs 16, a swizzle atom 1024
EXPAND_STAGES = 2  # stages that an expander fills at a time, from one of codes
UNPACK_COLUMNS = 1024  # that dispatch unpacks at a time: of a row 512 bytes of codes, one warp
PULL_ROWS = 4  # that dispatch fetches at a time
PULL_BYTES = 1024  # of each row that dispatch moves in a step, with up to three more on their way
# of weights on their way to one SM: more would not come sooner, and all else would wait behind it
IN_FLIGHT_BYTES = 98_304
SMS_H200 = 132
SHARED_BYTES = 232_448  # shared memory one CTA can have on sm_90
# left to the compiler for layout conversions and reductions: by whether the tile is a wide one
SHARED_SCRATCH = {False: 8_192, True: 17_408}

ITEMSIZE = {
    "int8": 1,
    "uint8": 1,
    "int32": 4,
    "int64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float8e4nv": 1,
}

# int32 words of the `control` region, one 128-byte line each so that no two flags share a line
CONTROL = {"epoch": 0, "counted": 32, "used_tokens": 64, "used_blocks": 96, "inexact": 128}
CONTROL_WORDS = 160
# int32 words of the `status` region: claimed by a report, abort, the report (phase, index, wanted,
# seen), report complete
STATUS_REPORTED = 6
STATUS_WORDS = 32


# roles that record a timeline, in the order of their events
ROLES = (
    "math 0",
    "math 1",
    "communicate",
    "load weights",
    "load tokens",
    "signal",
    "expand",
)
TRACE_WORDS = 4  # tag, begin, middle, end
# of a tag: bits for the tile, then for the block, then three for the kind of work
TRACE_BLOCK_BIT, TRACE_KIND_BIT = 10, 29


@dataclass(frozen=True)
class Region:
    """One named array of the symmetric buffer."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str
    writer: str
    reader: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * ITEMSIZE[self.dtype]


@dataclass(frozen=True)
class TilePolicy:
    """How the matrix products are cut.

    An L2 tile is ``block_n`` weight rows by ``block_m`` tokens, an L1 tile 256 weight rows, in one
    turn or two; each math partition owns half of it.  ``block_k`` columns of K travel in one
    stage.  In wide tiles MXFP4 codes land in ``packed_stages`` of their own, each ``packed_k``
    columns of K, from which ``expanders`` (one partition or none) fill the stages.  At most
    ``in_flight`` stages of weights are asked for before they have landed.  Where dispatch
    ``unpacks`` MXFP4 the tiles are those of FP8.
    """

    block_m: int
    block_n: int
    block_k: int
    stages: int
    packed_k: int
    packed_stages: int
    in_flight: int
    expanders: int
    unpacks: bool
    math_registers: int
    dispatch_registers: int
    expand_registers: int
    load_registers: int
    pull_rows: int

    @property
    def family(self) -> str:
        return "decode" if self.block_m <= 32 else "prefill"


@dataclass(frozen=True)
class KernelSpec:
    """Everything the kernel is specialised on; hashable, the cache key of a compilation."""

    recipe: str
    x_scales: str
    ranks: int
    experts: int
    experts_per_rank: int
    topk: int
    hidden: int
    padded_hidden: int
    padded_intermediate: int
    capacity: int
    clamp: float  # 0 for none
    timeout_ns: int
    # tiles
    block_m: int
    block_n: int
    block_k: int
    stages: int
    packed_k: int
    packed_stages: int
    in_flight: int
    expanders: int
    unpacks: bool
    pull_rows: int
    math_registers: int
    dispatch_registers: int
    expand_registers: int
    load_registers: int
    # schedule
    ring_blocks: int
    lag: int
    trace_events: int  # of each role and program, 0 for none
    phases: str  # "fused", or one launch of the chain: "dispatch", "linear1", "linear2", "combine"
    # byte offsets of the regions
    offset: Offsets
    rules: str = RULES

    @property
    def weights(self) -> str:
        """The recipe whose weights the tiles read."""
        return "fp8" if self.unpacks else self.recipe

    @property
    def weight_bits(self) -> int:
        return {"bf16": 16, "mxfp4": 4}.get(self.weights, 8)

    @property
    def x_bytes(self) -> int:
        return 2 if self.recipe == "bf16" else 1

    @property
    def stage_bytes_w(self) -> int:
        return self.block_n * self.packed_k * self.weight_bits // 8

    @property
    def factor_rows(self) -> int:
        """Rows of four-byte factors that come with a stage of weights: each is for 128 of K and
        holds a scale (fp8_block) or four exponent offsets (mxfp4) for every weight row.
        """
        return factor_rows(self.weights, self.packed_k)

    @property
    def packed_bytes(self) -> int:
        """What lands in a stage from the weights: their values and their factors."""
        return self.stage_bytes_w + 4 * self.factor_rows * self.block_n

    @property
    def stage_bytes_x(self) -> int:
        return self.block_m * self.block_k * self.x_bytes

    @property
    def box_m(self) -> int:
        """Rows of the pool that TMA loads at once: what a math partition owns of a wide block."""
        return PART_ROWS if self.tokens_first else self.block_m

    @property
    def tokens_first(self) -> bool:
        """Whether tokens are the M side of WGMMA: in wide tiles."""
        return self.block_m == 128

    @property
    def row_scaled(self) -> bool:
        """Whether a weight row and a token's row have one scale each, applied to finished sums."""
        return self.recipe in ("fp8", "mxfp4")

    @property
    def expands(self) -> bool:
        """Whether math partitions expand MXFP4 codes on their way to WGMMA."""
        return self.weights == "mxfp4" and self.expanders == 0

    @property
    def halves(self) -> int:
        """Accumulators of a math partition: one for each 128 weight rows of a stage."""
        return self.block_n // HALF_N

    @property
    def l1_turns(self) -> int:
        """Times that K is walked for an L1 tile."""
        return L1_ROWS // self.block_n

    @property
    def l1_steps(self) -> int:
        """Stages of an L1 tile."""
        return self.l1_turns * self.padded_hidden // self.block_k

    @property
    def rehearses(self) -> bool:
        """Whether a launch begins with a rehearsal: see :mod:`megamoe.kernel.schedule`."""
        return self.phases == "fused"

    @property
    def rehearsal_steps(self) -> int:
        """Stages of a rehearsal, for each time that K is walked for an L1 tile: one of codes."""
        return self.packed_k // self.block_k

    @property
    def l2_steps(self) -> int:
        """Stages of an L2 tile."""
        return self.padded_intermediate // self.block_k

    @property
    def early(self) -> bool:
        """Whether registers hold what a tile's epilogue needs of its tokens through the K loop."""
        return not self.tokens_first

    @property
    def tile_columns(self) -> int:
        """N side of a partition's product."""
        return HALF_N if self.tokens_first else self.block_m

    @property
    def sets_aside(self) -> bool:
        """Whether the first half of an activated L1 tile waits in shared memory for the second:
        beside an expander there are too few registers for it through a K loop.
        """
        return self.phases == "fused" and self.expanders > 0

    @property
    def exchanges_maxima(self) -> bool:
        """Whether both math partitions have a part of each scale group of L1's output."""
        return self.phases == "fused" and self.recipe != "bf16" and not self.tokens_first

    @property
    def scope(self) -> str:
        """PTX scope of what ranks say to each other."""
        return "gpu" if self.ranks == 1 else "sys"

    @property
    def signal_lanes(self) -> int:
        return max(32, self.block_m)

    @property
    def l1_scale_rows(self) -> int:
        """Scale rows of x that come with a stage of L1: only where they are applied in the K
        loop.
        """
        return self.block_k // K_GROUP if self.recipe == "fp8_block" else 0

    @property
    def l2_scale_rows(self) -> int:
        """Scale rows of L1's output that come with a stage of L2."""
        return 0 if self.recipe == "bf16" else self.block_k // H_GROUP

    @property
    def stage_scale_rows(self) -> int:
        return max(1, self.l1_scale_rows, self.l2_scale_rows)

    @property
    def l1_tiles(self) -> int:
        return 2 * self.padded_intermediate // L1_ROWS

    @property
    def l2_tiles(self) -> int:
        return self.padded_hidden // self.block_n

    @property
    def ring_rows(self) -> int:
        return self.ring_blocks * self.block_m

    @property
    def pull_groups(self) -> int:
        """Scale groups of a row that dispatch moves in a step; a power of two."""
        return min(PULL_BYTES // 32, largest_power_of_two_in(self.padded_hidden // 32))

    @property
    def pull_ahead(self) -> int:
        """Steps of a row that are on their way while one is rebased: what registers hold."""
        return 1 if self.block_m == 128 else 3

    @property
    def code_lanes(self) -> int:
        """Blocks of 128 of a row, each a scale or a word of four scale codes, padded to a power of
        two of at least a warp.
        """
        return max(32, power_of_two(self.padded_hidden // 128))

    @property
    def pull_words(self) -> int:
        """The same in 4-byte words, where rows are copied as they are."""
        return min(PULL_BYTES // 4, largest_power_of_two_in(self.padded_hidden * self.x_bytes // 4))

    @property
    def unpack_columns(self) -> int:
        """Columns of K that dispatch unpacks at a time; a power of two."""
        return min(
            UNPACK_COLUMNS,
            largest_power_of_two_in(self.padded_hidden),
            largest_power_of_two_in(self.padded_intermediate),
        )

    @property
    def expert_lanes(self) -> int:
        """Local experts, padded to a power of two of at least a warp."""
        return max(32, power_of_two(self.experts_per_rank))

    @property
    def all_expert_lanes(self) -> int:
        return max(128, power_of_two(self.experts))

    @property
    def rank_lanes(self) -> int:
        return max(32, power_of_two(self.ranks))


@dataclass(frozen=True)
class Offsets:
    """Byte offset of each region in the symmetric buffer, by the region's name."""

    status: int
    control: int
    counts_ready: int
    recv_counts: int
    send_counts: int
    arrived: int
    l1_done: int
    l2_done: int
    token_arrivals: int
    claimed: int
    unpacked: int
    topk_idx: int
    topk_weights: int
    x: int
    x_scale: int
    routes: int
    pool_x: int
    pool_x_scale: int
    pool_weight: int
    pool_origin: int
    pool_h: int
    pool_h_scale: int
    partials: int
    l1_acc: int
    trace: int
    # strides between the two counter sets, bytes
    block_set: int
    token_set: int
    program_set: int
    unpacked_set: int


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least ``n``."""
    return 1 << (n - 1).bit_length()


def largest_power_of_two_in(n: int) -> int:
    """The largest power of two that divides ``n``."""
    return n & -n


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def align_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def factor_rows(recipe: str, packed_k: int) -> int:
    """See :attr:`KernelSpec.factor_rows`."""
    return packed_k // 128 if recipe in ("fp8_block", "mxfp4") else 0


def max_blocks(config: MoEConfig, block_m: int) -> int:
    """Pool blocks one rank can need, whatever the routing: every row of every rank may come
    here.
    """
    rows = config.ranks * config.capacity * config.topk
    return min(rows, rows // block_m + config.experts_per_rank)


def max_pulls(config: MoEConfig) -> int:
    """Groups of rows that dispatch of one rank can fetch, whatever the routing."""
    return ceil_div(config.ranks * config.capacity * config.topk, PULL_ROWS)


def tile_policy(config: MoEConfig, tokens_per_expert: float, *, chain: bool = False) -> TilePolicy:
    """Tiles for the live rows of an average expert: decode keeps token columns few, prefill makes
    them wide.

    Results do not depend on the choice: the order of K and the promotion step are the same in
    every tile.  The chain never unpacks MXFP4, so that it says what the fused kernel should get
    without that way.
    """
    block_m = config.block_m
    if block_m is None:
        block_m = next(b for most, b in TILES if tokens_per_expert <= most)
    recipe = config.recipe
    unpacks = recipe == "mxfp4" and block_m == 128 and tokens_per_expert > UNPACK_ROWS and not chain
    if unpacks:
        recipe = "fp8"  # as far as tiles see
    # narrow tiles have the math expand MXFP4 codes, in wide ones weights are no register operand
    expands = recipe == "mxfp4" and block_m <= 64
    if recipe == "bf16":
        block_k, x_bytes = 64, 2
    elif block_m <= 32 or expands:
        block_k, x_bytes = 256, 1  # products are short: two K groups for each turn of the barriers
    else:
        block_k, x_bytes = 128, 1
    expanders = int(recipe == "mxfp4" and not expands)
    # wide tiles are fed by shared memory and L2: twice the weight rows need a tenth less of one and
    # a quarter less of the other, where registers hold their accumulators
    wide = block_m == 128 and tokens_per_expert > WIDE_ROWS and recipe in ("fp8", "bf16")
    block_n = 2 * HALF_N if wide else HALF_N
    scale_rows = 1 if recipe == "bf16" else block_k // H_GROUP
    packed_k = EXPAND_STAGES * block_k if expanders else block_k
    factors = 4 * factor_rows(recipe, packed_k) * block_n
    room = SHARED_BYTES - SHARED_SCRATCH[block_m == 128]
    if expanders:
        room -= 4 * block_m * H_GROUP // 2  # half of an activated tile: KernelSpec.sets_aside
    # bytes of a weight row where it lands, and in a stage
    landed_row = packed_k // 2 if recipe == "mxfp4" else packed_k * x_bytes
    stage_row = block_k if expanders else landed_row
    stage = block_n * stage_row + block_m * block_k * x_bytes + 4 * scale_rows * block_m
    if expanders:
        # codes run ahead of the memory's latency; a few expanded stages are enough
        stages = 4
        packed_stages = (room - stages * stage) // (block_n * landed_row + factors)
    else:
        stages = packed_stages = min(10, room // (stage + factors))
    in_flight = min(packed_stages, IN_FLIGHT_BYTES // (block_n * landed_row))
    # of a thread in math, communicate, expand, load: over the warpgroups they add up to what the
    # launch has, 4 x 128, with a warpgroup of expanders 5 x 96
    if expanders:
        registers = (152, 72, 72, 32)
    else:
        registers = (208, 64, 0, 32) if block_m == 128 else (184, 112, 0, 32)
    return TilePolicy(
        block_m,
        block_n,
        block_k,
        stages,
        packed_k,
        packed_stages,
        in_flight,
        expanders,
        unpacks,
        *registers,
        pull_rows=PULL_ROWS,
    )


def lag_blocks(config: MoEConfig, programs: int) -> int:
    """Blocks by which L2 trails L1: one and a half waves of L1 tiles, so that an L1 block is
    finished when L2 asks for it.
    """
    l1_tiles = 2 * config.padded_intermediate // L1_ROWS
    return ceil_div(3 * programs, 2 * l1_tiles) + 1


@dataclass(frozen=True)
class Plan:
    """Memory and constants for one configuration on a GPU of ``programs`` SMs.

    ``chain=True`` plans for the unfused chain: the pool holds every block at once and the raw L1
    accumulators too. ``trace`` is the number of events a role of a program can record in the
    timeline, 0 for no timeline; MegaMoEConfigError if a call could fetch more than its events can
    number.
    """

    config: MoEConfig
    programs: int = SMS_H200
    chain: bool = False
    trace: int = 0

    def __post_init__(self) -> None:
        if self.trace and max_pulls(self.config) > 1 << (TRACE_KIND_BIT - TRACE_BLOCK_BIT):
            raise MegaMoEConfigError(
                f"a timeline can number {1 << (TRACE_KIND_BIT - TRACE_BLOCK_BIT)} groups of rows, "
                f"with {self.config.ranks} ranks of {self.config.capacity} tokens one may fetch "
                f"{max_pulls(self.config)}: record a call with a smaller capacity"
            )

    def ring_blocks(self, block_m: int) -> int:
        """Blocks alive at once: those L2 trails by, the one in L1, and as many pulled ahead of
        it.
        """
        blocks = max_blocks(self.config, block_m)
        if self.chain:
            return max(1, blocks)
        policy = self._policy(block_m)
        lag = lag_blocks(self.config, self.programs)
        # a pull that waits for the slot of its last row's block has not yet signalled its first
        # row: that block must not be among those the slot waits for
        ahead = max(policy.pull_rows, ceil_div(16 * self.programs, block_m))
        return max(1, min(blocks, lag + 1 + ahead))

    def _policy(self, block_m: int) -> TilePolicy:
        return tile_policy(self.config, block_m, chain=self.chain)

    @cached_property
    def ring_rows(self) -> int:
        sizes = (self.config.block_m,) if self.config.block_m else BLOCK_MS
        return max(self.ring_blocks(b) * b for b in sizes)

    @cached_property
    def regions(self) -> tuple[Region, ...]:
        c = self.config
        t, k, rows = c.capacity, c.topk, self.ring_rows
        hp, ip = c.padded_hidden, c.padded_intermediate
        blocks = align_up(max_blocks(c, min(BLOCK_MS)), 32)
        wire = "bfloat16" if c.recipe == "bf16" else "float8e4nv"
        scale = {
            "none": ((0,), "float32"),
            "token": ((t,), "float32"),
            "ue8m0_32": ((t, hp // 32), "uint8"),
            "block128": ((t, hp // 128), "float32"),
        }[c.x_scales]
        pool_scale = {"none": (0,), "block128": (hp // 128, rows)}.get(c.x_scales, (rows,))
        h_scale = (0,) if c.recipe == "bf16" else (ip // H_GROUP, rows)
        acc = (rows, 2 * ip) if self.chain else (0,)
        unpacked = c.experts_per_rank if self.unpacked_bytes else 0
        table = [
            # name, shape, dtype, writer, reader
            ("status", (STATUS_WORDS,), "int32", "a wait that expired", "host; every wait"),
            ("control", (CONTROL_WORDS,), "int32", "dispatch", "every role of the next launch"),
            (
                "counts_ready",
                (align_up(c.ranks, 32),),
                "int32",
                "dispatch of every rank",
                "schedule, dispatch",
            ),
            (
                "recv_counts",
                (SETS, c.ranks, c.experts_per_rank),
                "int32",
                "dispatch of every rank",
                "schedule, dispatch",
            ),
            ("send_counts", (SETS, c.experts), "int32", "dispatch", "dispatch"),
            ("arrived", (SETS, blocks), "int32", "dispatch", "load tokens; load weights"),
            ("l1_done", (SETS, blocks), "int32", "signal", "load tokens"),
            ("l2_done", (SETS, blocks), "int32", "signal", "dispatch; signal"),
            ("token_arrivals", (SETS, align_up(t, 32)), "int32", "signal of every rank", "combine"),
            ("claimed", (SETS, align_up(self.programs, 32)), "int32", "combine", "combine"),
            ("unpacked", (SETS, unpacked), "int32", "dispatch", "load weights"),
            ("topk_idx", (t, k), "int32", "caller", "dispatch, combine"),
            ("topk_weights", (t, k), "float32", "caller", "dispatch of every rank"),
            ("x", (t, hp), wire, "caller", "dispatch of every rank"),
            ("x_scale", *scale, "caller", "dispatch of every rank"),
            (
                "routes",
                (c.ranks, c.experts_per_rank, t * k),
                "int32",
                "dispatch of every rank",
                "dispatch",
            ),
            ("pool_x", (rows, hp), wire, "dispatch", "load tokens"),
            ("pool_x_scale", pool_scale, "float32", "dispatch", "math (L1)"),
            ("pool_weight", (rows,), "float32", "dispatch", "math (L1)"),
            ("pool_origin", (rows,), "int64", "dispatch", "math (L2)"),
            ("pool_h", (rows, ip), wire, "math (L1)", "load tokens"),
            ("pool_h_scale", h_scale, "float32", "math (L1)", "math (L2)"),
            ("partials", (t, k, hp), "bfloat16", "math (L2) of every rank", "combine"),
            ("l1_acc", acc, "float32", "math (L1), chain only", "activation, chain only"),
            (
                "trace",
                (self.programs * len(ROLES) * self.trace, TRACE_WORDS),
                "int32",
                "every role, if asked",
                "host",
            ),
        ]
        regions, offset = [], 0
        for name, shape, dtype, writer, reader in table:
            regions.append(Region(name, offset, shape, dtype, writer, reader))
            offset = align_up(offset + regions[-1].nbytes, ALIGN)
        return tuple(regions)

    @cached_property
    def region(self) -> dict[str, Region]:
        return {r.name: r for r in self.regions}

    @property
    def unpacked_bytes(self) -> int:
        """Memory beside the buffer, of which no other rank knows: all experts of a rank as e4m3, w1
        then w2, if the longest call unpacks MXFP4; else 0.
        """
        if not self.policy(self.config.capacity).unpacks:
            return 0
        c = self.config
        return c.experts_per_rank * 3 * c.padded_hidden * c.padded_intermediate

    @property
    def nbytes(self) -> int:
        last = self.regions[-1]
        return align_up(last.offset + last.nbytes, ALIGN)

    def policy(self, tokens: int) -> TilePolicy:
        """Tile policy for a call with ``tokens`` tokens on this rank, all ranks assumed alike."""
        c = self.config
        return tile_policy(c, tokens * c.ranks * c.topk / c.experts, chain=self.chain)

    def spec(self, policy: TilePolicy, phases: str = "fused") -> KernelSpec:
        c = self.config
        offset = Offsets(
            **{r.name: r.offset for r in self.regions},
            block_set=self.region["arrived"].nbytes // SETS,
            token_set=self.region["token_arrivals"].nbytes // SETS,
            program_set=self.region["claimed"].nbytes // SETS,
            unpacked_set=self.region["unpacked"].nbytes // SETS,
        )
        return KernelSpec(
            recipe=c.recipe,
            x_scales=c.x_scales,
            ranks=c.ranks,
            experts=c.experts,
            experts_per_rank=c.experts_per_rank,
            topk=c.topk,
            hidden=c.hidden,
            padded_hidden=c.padded_hidden,
            padded_intermediate=c.padded_intermediate,
            capacity=c.capacity,
            clamp=float(c.clamp or 0.0),
            timeout_ns=int(c.timeout_s * 1e9),
            block_m=policy.block_m,
            block_n=policy.block_n,
            block_k=policy.block_k,
            stages=policy.stages,
            packed_k=policy.packed_k,
            packed_stages=policy.packed_stages,
            in_flight=policy.in_flight,
            expanders=policy.expanders,
            unpacks=policy.unpacks,
            pull_rows=policy.pull_rows,
            math_registers=policy.math_registers,
            dispatch_registers=policy.dispatch_registers,
            expand_registers=policy.expand_registers,
            load_registers=policy.load_registers,
            ring_blocks=self.ring_blocks(policy.block_m),
            lag=lag_blocks(c, self.programs),
            trace_events=self.trace,
            phases=phases,
            offset=offset,
        )
