"""What test_mutations.py breaks in the kernel, a thing at a time, and how it must come to light."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """edits: (old text, new text); each old one occurs once in the kernel, in any layout."""

    name: str
    edits: tuple[tuple[str, str], ...]
    caught_as: str  # names, separated by blanks or " or "
    scene: str = "calls"


def broken(name: str, old: str, new: str, caught_as: str, scene: str = "calls") -> Mutation:
    return Mutation(name, ((old, new),), caught_as, scene)


def part(prefix: str, scene: str, usual: str = "wrong bits") -> Callable[..., Mutation]:
    """:func:`broken` for one part of the kernel, in the scene where it matters."""

    def mutation(name: str, old: str, new: str, caught_as: str = usual) -> Mutation:
        return broken(f"{prefix}: {name}", old, new, caught_as, scene)

    return mutation


def in_each(*scenes: str) -> Callable[..., list[Mutation]]:
    """:func:`broken` in every one of the scenes."""

    def mutations(name: str, old: str, new: str, caught_as: str = "wrong bits") -> list[Mutation]:
        return [broken(f"{name}, {s}", old, new, caught_as, s) for s in scenes]

    return mutations


# --- waits that are missing or too short -------------------------------------------------------

# of the tokens' loader, and of the weights' after its first stage
ROWS_WANTED = "wanted = gl.where(kind == REHEARSAL, 0, spec.block_m)"
GATE_WAIT = "spec)\n                wait_gpu(arrived + block, spec.block_m,"

WAITS = [
    broken("L1 does not wait for rows", ROWS_WANTED, "wanted = 0",
           "UnwrittenRead or DataRace"),
    broken("L1 waits for a row less", ROWS_WANTED,
           ROWS_WANTED.replace("spec.block_m", "spec.block_m - 1"),
           "UnwrittenRead or DataRace", "crowded"),
    broken("weights wait for more rows than a block has", GATE_WAIT,
           GATE_WAIT.replace("spec.block_m", "spec.block_m + 1"), "Deadlock"),
    broken(
        "L2 does not wait for L1", "wait_gpu(l1_done + block, spec.l1_tiles,",
        "wait_gpu(l1_done + block, 0,", "UnwrittenRead or DataRace",
    ),
    broken(
        "L2 waits for an L1 tile less", "wait_gpu(l1_done + block, spec.l1_tiles,",
        "wait_gpu(l1_done + block, spec.l1_tiles - 1,", "UnwrittenRead or DataRace",
    ),
    broken(
        "counts of the call before", "source * 0 + ctx.epoch, ctx.status()",
        "source * 0 + ctx.epoch - 1, ctx.status()", "DataRace",
    ),
    Mutation(
        "counts are not waited for",
        (("source * 0 + ctx.epoch, ctx.status()", "source * 0, ctx.status()"),
         ("return gl.min(((seen.to(gl.int64) - ctx.epoch).to(gl.int32) >= 0).to(gl.int32), 0)",
          "return 1")),
        "DataRace",
    ),
    broken("ring slot is not waited for", "if blocks > spec.ring_blocks:", "if blocks < 0:",
           "DataRace", "ring"),
    broken(
        "ring slot is taken a tile early", "gl.where(block >= spec.ring_blocks, spec.l2_tiles, 0)",
        "gl.where(block >= spec.ring_blocks, spec.l2_tiles - 1, 0)", "DataRace", "ring",
    ),
    broken("combine does not wait", "wait_sys(arrivals_of(ctx) + token, active,",
           "wait_sys(arrivals_of(ctx) + token, active * 0,", "UnwrittenRead or DataRace"),
    broken("combine waits for one partial", "wait_sys(arrivals_of(ctx) + token, active,",
           "wait_sys(arrivals_of(ctx) + token, gl.minimum(active, 1),",
           "wrong bits"),  # NaN: what has not come is not read
    broken("tokens combined between pulls before they are complete", "peek_sys(arrivals_of(ctx)",
           "100 + peek_sys(arrivals_of(ctx)", "UnwrittenRead or DataRace", "ring"),
    broken("signal does not wait for the math", "mbarrier.wait(rings.tile_done.index(", "max((",
           "DataRace"),
]  # fmt: skip

# --- order, scope, barriers and fences of signals ----------------------------------------------

POLL = "ld.acquire.SCOPE.global.b32 v, [$1];"
PEEK = "ld.acquire.sys.global.b32 $0, [$1];"
POLL_SYS = 'POLL_SYS = gl.constexpr(_POLL.replace("SCOPE", "sys"))'
TILE = 'gl.atomic_add(flag, 1, sem="release", scope="gpu")'
ROWS = 'gl.atomic_add(flags, amounts, mask=mask, sem="release", scope="gpu")'
LAST = 'gl.atomic_add(flag, 1, sem="acq_rel", scope=SCOPE) == last'
PEERS = 'gl.atomic_add(flags, mask.to(gl.int32), mask=mask, sem="release", scope="sys")'
FLAGS = 'gl.atomic_xchg(flags, value, mask=mask, sem="release", scope="sys")'
L2_LAST = "arrive_last(l2_done + block, spec.l2_tiles - 1, scope)"
L2_UNORDERED = 'gl.atomic_add(l2_done + block, 1, sem="{}", scope="sys") == spec.l2_tiles - 1'
FENCE = "fence_async_proxy(every_thread())"
STORE_COUNTS = (
    "gl.store(theirs + row * spec.experts_per_rank + expert % spec.experts_per_rank, "
    "count, mask=exists)"
)
RAISE_FLAGS = "set_peers(flags, r * 0 + ctx.epoch, r < spec.ranks)"


def weaker(name: str, text: str, old: str, new: str, caught_as: str, scene: str = "calls"):
    return broken(name, text, text.replace(old, new), caught_as, scene)


SIGNALS = [
    weaker("polls without acquire", POLL, "acquire", "relaxed", "DataRace"),
    weaker("polls peers at gpu scope", POLL_SYS, '"sys"', '"gpu"', "DataRace"),
    weaker("peeks without acquire", PEEK, "acquire", "relaxed", "DataRace", "two rings"),
    weaker("peeks at gpu scope", PEEK, "sys", "gpu", "DataRace", "two rings"),
    weaker("L1 tile signalled without release", TILE, "release", "relaxed", "DataRace"),
    weaker("rows signalled without release", ROWS, "release", "relaxed", "DataRace"),
    weaker("flags raised without release", FLAGS, "release", "relaxed", "DataRace"),
    weaker("flags raised at gpu scope", FLAGS, "sys", "gpu", "DataRace"),
    weaker("partials signalled without release", PEERS, "release", "relaxed", "DataRace"),
    weaker("partials signalled at gpu scope", PEERS, "sys", "gpu", "DataRace"),
    weaker("last arrival without acquire", LAST, "acq_rel", "release", "DataRace"),
    weaker("arrivals without release", LAST, "acq_rel", "acquire", "DataRace"),
    broken("last L2 tile without acquire", L2_LAST, L2_UNORDERED.format("release"),
           "DataRace", "prefill"),
    broken("L2 tiles without release", L2_LAST, L2_UNORDERED.format("acquire"),
           "DataRace", "prefill"),
    Mutation(
        "flags raised before the counts are stored",
        ((STORE_COUNTS, "pass"), (RAISE_FLAGS, f"{RAISE_FLAGS}\n    {STORE_COUNTS}")), "DataRace",
    ),
    broken("last arrival before all warps stored", "cta_barrier() return gl.atomic_add(flag, ",
           "return gl.atomic_add(flag, ", "DataRace"),
    broken("no fence after rows are stored", f"{FENCE} cta_barrier() {ROWS}",
           f"cta_barrier()\n    {ROWS}", "ProxyFault"),
    broken("no fence before an L1 tile is signalled", f"{FENCE} cta_barrier() {TILE}",
           f"cta_barrier()\n    {TILE}", "ProxyFault"),
    broken("no fence before rows are loaded",
           "PHASE_ROWS, block, spec.timeout_ns) fence_async_proxy(seen)",
           "PHASE_ROWS, block, spec.timeout_ns)", "ProxyFault"),
    broken("no fence before L1's output is loaded",
           "PHASE_L1, block, spec.timeout_ns) fence_async_proxy(seen)",
           "PHASE_L1, block, spec.timeout_ns)", "ProxyFault"),
]  # fmt: skip

# --- mbarriers: counts, bytes, phases ----------------------------------------------------------

EXPECT = "mbarrier.expect(full.index(stage), BYTES"
TASK_EMPTY = "task_empty.index(i), count=MATH_PARTITIONS + spec.expanders + 3"
TASK_WAIT = "mbarrier.wait(rings.task_empty.index(slot), ((i // TASK_SLOTS) & 1) ^ 1)"
TASK_READ = "mbarrier.wait(rings.task_full.index(slot), (i // TASK_SLOTS) & 1)"
EMPTY_COUNT = "mbarrier.init(empty.index(i), count=MATH_PARTITIONS"
AMAX_COUNT = "amax_full.index(0), count=MATH_PARTITIONS"
LANDED = "phase = (before // spec.packed_stages) & 1"

MBARRIERS = [
    broken("full: one arrival", "mbarrier.init(full.index(i), count=2)",
           "mbarrier.init(full.index(i), count=1)",
           "UnwrittenRead or SharedMemoryRace or BarrierFault"),
    broken("full: three arrivals", "mbarrier.init(full.index(i), count=2)",
           "mbarrier.init(full.index(i), count=3)", "Deadlock"),
    broken("empty: a partition less", EMPTY_COUNT, f"{EMPTY_COUNT} - 1",
           "SharedMemoryRace or BarrierFault or Deadlock"),
    broken("empty: a partition more", EMPTY_COUNT, f"{EMPTY_COUNT} + 1", "Deadlock"),
    broken("task_empty: a reader less", TASK_EMPTY, TASK_EMPTY.replace("3", "2"),
           "SharedMemoryRace or BarrierFault"),
    broken("task_empty: a reader more", TASK_EMPTY, TASK_EMPTY.replace("3", "4"), "Deadlock"),
    broken("task_full: two arrivals", "task_full.index(i), count=1",
           "task_full.index(i), count=2", "Deadlock"),
    broken("tile_done: a partition less", "tile_done.index(i), count=MATH_PARTITIONS",
           "tile_done.index(i), count=MATH_PARTITIONS - 1",
           "DataRace or BarrierFault or Deadlock"),
    broken("tile_done: a partition more", "tile_done.index(i), count=MATH_PARTITIONS",
           "tile_done.index(i), count=MATH_PARTITIONS + 1", "Deadlock"),
    broken("amax_full: one arrival", AMAX_COUNT, f"{AMAX_COUNT} - 1",
           "SharedMemoryRace or UnwrittenRead"),
    broken("amax_full: three arrivals", AMAX_COUNT, f"{AMAX_COUNT} + 1", "Deadlock"),
    broken("fewer bytes expected", EXPECT, f"{EXPECT} - 16", "BarrierFault or SharedMemoryRace"),
    broken("more bytes expected", EXPECT, f"{EXPECT} + 16", "Deadlock"),
    broken("bytes of the scales not expected", "half_bytes + scale_bytes, spec.stages",
           "half_bytes, spec.stages", "BarrierFault"),
    broken("stage read a phase early", "(step // STAGES) & 1) return stage",
           "((step // STAGES) & 1) ^ 1)\n    return stage",
           "UnwrittenRead or SharedMemoryRace or DataRace"),
    broken("stage filled a phase late", "((step // STAGES) & 1) ^ 1)", "(step // STAGES) & 1)",
           "Deadlock"),
    broken("task read a phase early", TASK_READ, TASK_READ.replace(" & 1", " & 1 ^ 1"),
           "UnwrittenRead or SharedMemoryRace"),
    broken("task announced before it is written",
           "rings.tasks.index(slot).store(record) cta_barrier() "
           "mbarrier.arrive(rings.task_full.index(slot), count=1)",
           "mbarrier.arrive(rings.task_full.index(slot), count=1)\n"
           "    rings.tasks.index(slot).store(record)", "UnwrittenRead or SharedMemoryRace"),
    broken("task slot written again at once", TASK_WAIT, "slot = slot + 0",
           "SharedMemoryRace or Deadlock or BarrierFault", "ring"),
    broken("tile_done waited for in one phase",
           "rings.tile_done.index(i % TASK_SLOTS), (i // TASK_SLOTS) & 1",
           "rings.tile_done.index(i % TASK_SLOTS), 0",
           "DataRace or Deadlock or ProxyFault", "ring"),
    broken("weights on their way waited for in the wrong phase", LANDED, f"{LANDED} ^ 1",
           "Deadlock"),
    broken("weights waited for before they are asked for", "before = step - spec.in_flight",
           "before = step", "Deadlock"),
]  # fmt: skip

# --- rings in shared memory, and of the pool, handed back too soon -----------------------------

# of a stage without scales; one with scales is given back a turn later
RELEASE = "if not SCALED:\n            give_back(rings, step, spec.stages)"
LATE_RELEASE = """if SCALED:
            if k > 0:
                give_back(rings, step - 1, spec.stages)
        stage = take_stage(rings, step, spec.stages)
        scale = 0.0"""
LAST_RELEASE = "if SCALED: give_back(rings, step - 1, spec.stages) return acc, acc, step"
PRODUCT = "product = warpgroup_mma_wait(0, deps=[product])"
LATER = "scale = group_scales(spec, rings, stage, 1, UP, PART, layout)"
SCALES_READ = """if SCALED:
            scale = group_scales(spec, rings, stage, 0, UP, PART, layout)
        if TWO:"""
# of the loop with one accumulator, which then gives its stages back elsewhere
NO_LATE_RELEASE = (
    (LATE_RELEASE, LATE_RELEASE[LATE_RELEASE.index("stage ="):]),
    (LAST_RELEASE, "return acc, acc, step"),
)  # fmt: skip
NOW = "give_back(rings, step, spec.stages)"
ORIGINS = """origin = gl.load(ctx.region(spec.offset.pool_origin, gl.int64) + slot + row,
            mask=real, other=0, cache_modifier=".cg")"""
SOURCES = "source, entry, real = origin_of(spec, origin, real)"
FIRST_HALF = "acc = promote(acc, product, scale, SCALED)"
LAST_HALF = "more = promote(more, product,"
SECOND_HALF = "product = begin_product(spec, rings, stage, 0, PART, 1, layout)"
BF16_STEP = "warpgroup_mma_wait({}, deps=[acc{}]) else:"
GIVEN_BACK = "if k > 0: give_back(rings, step - 1, spec.stages) step += 1"
NARROW, WIDE = "mxfp4", "mxfp4 wide"  # expanded by the math; by an expander
FP8_HALVES, BF16_HALVES = "fp8 halves", "bf16 halves"

RINGS = [
    *(broken(f"stage released before WGMMA has read it, {s}", f"{PRODUCT} {RELEASE}",
             f"{RELEASE}\n        {PRODUCT}", "SharedMemoryRace", s)
      for s in ("fp8 long", NARROW, WIDE)),
    Mutation(
        "stage released before its scales are read",
        (*NO_LATE_RELEASE,
         (SCALES_READ, f"if SCALED:\n            {NOW}\n        {SCALES_READ}")),
        "SharedMemoryRace", "fp8 long",
    ),
    broken("only the first of two products is waited for", f"{PRODUCT} {RELEASE}",
           f"{PRODUCT.replace('0', '1')}\n        {RELEASE}", "AsyncFault or SharedMemoryRace"),
    broken("neither of two products is waited for before the first is promoted",
           PRODUCT.replace("0", "1"), PRODUCT.replace("0", "2"), "AsyncFault"),
    broken("second product is the first", "later = begin_product(spec, rings, stage, 1,",
           "later = begin_product(spec, rings, stage, 0,", "wrong bits"),
    broken("second product takes the scales of the first", LATER, LATER.replace("1", "0"),
           "wrong bits", "fp8 long"),
    Mutation(
        "halves: stage released after the first's product",
        ((f"{FIRST_HALF} {SECOND_HALF}", f"{NOW}\n        {FIRST_HALF}\n        {SECOND_HALF}"),
         (f"{PRODUCT} {NOW} {LAST_HALF}", f"{PRODUCT}\n        {LAST_HALF}")),
        "SharedMemoryRace", FP8_HALVES,
    ),
    broken("halves: stage released before the second's product has read it",
           f"{PRODUCT} {NOW} {LAST_HALF}",
           f"{NOW}\n        {PRODUCT}\n        {LAST_HALF}", "SharedMemoryRace", FP8_HALVES),
    broken("halves: second product is not waited for", f"{PRODUCT} {NOW}",
           f"{PRODUCT.replace('0', '1')}\n        {NOW}", "AsyncFault or SharedMemoryRace",
           FP8_HALVES),
    broken("halves: second product takes the first's rows", "stage, 0, PART, 1, layout)",
           "stage, 0, PART, 0, layout)", "wrong bits", FP8_HALVES),
    broken("halves: second takes the first's weight scales", "row_scales(spec, scales + HALF_N,",
           "row_scales(spec, scales,", "wrong bits", FP8_HALVES),
    *(broken(f"second half pushed over the first, {s}", "push(ctx, more, rows, real, row0 + HALF_N",
             "push(ctx, more, rows, real, row0", "UnwrittenRead", s)
      for s in (FP8_HALVES, BF16_HALVES)),
    broken("bf16: stage released while WGMMA reads it", "warpgroup_mma_wait(1, deps=[acc])",
           "warpgroup_mma_wait(2, deps=[acc])", "SharedMemoryRace", "bf16"),
    broken("bf16: last product is not waited for", "acc = warpgroup_mma_wait(0, deps=[acc])",
           "acc = warpgroup_mma_wait(1, deps=[acc])", "AsyncFault or SharedMemoryRace", "bf16"),
    broken("bf16: stage of another tile given back", GIVEN_BACK,
           "if k >= 0:\n            give_back(rings, step - 1, spec.stages)\n        step += 1",
           "BarrierFault or SharedMemoryRace or Deadlock", "bf16"),
    broken("bf16 halves: stage released while WGMMA reads it",
           "warpgroup_mma_wait(2, deps=[acc, more])", "warpgroup_mma_wait(3, deps=[acc, more])",
           "SharedMemoryRace", BF16_HALVES),
    broken("bf16 halves: last product is not waited for", "warpgroup_mma_wait(0, deps=[acc, more])",
           "warpgroup_mma_wait(1, deps=[acc, more])", "AsyncFault or SharedMemoryRace",
           BF16_HALVES),
    broken("bf16 halves: second product takes the first's rows", "spec.block_k, PART, 1)",
           "spec.block_k, PART, 0)", "wrong bits", BF16_HALVES),
    broken("origins read after the slot is handed back", f"{ORIGINS} {SOURCES} if {L2_LAST}:",
           f"if {L2_LAST}:\n        {ORIGINS}\n        {SOURCES}", "DataRace", "ring"),
]  # fmt: skip

# --- before and after the K loops of a tile -----------------------------------------------------

EARLY = "take_stage(rings, step, spec.stages)"
X_SCALE, OWNERS = "x_scale, weight = factors_of_tokens", "origin, real = origins"
TURN_ROW, TURNS = "row = tile * L1_ROWS + turn * spec.block_n", "range(spec.l1_turns)"
BIGGEST = "gl.maximum(gl.maximum(low, -low), gl.maximum(high, -high))"
STORE_MAXIMA = "rings.amax.index(first + PART).store(amax)"
ARRIVE_MAXIMA = "mbarrier.arrive(rings.amax_full.index(0), count=1)"
WAIT_MAXIMA = "mbarrier.wait(rings.amax_full.index(0), count & 1)"
UPPER_COLUMNS = "tile * H_GROUP + H_GROUP // 2"
ASIDE = "low = rings.aside.index(PART).load("

EPILOGUE = [
    broken("factors of tokens read before the tile's first stage", f"{EARLY} {X_SCALE}", X_SCALE,
           "UnwrittenRead or DataRace"),
    broken("origins read before the tile's first stage", f"{EARLY} {OWNERS}", OWNERS,
           "UnwrittenRead or DataRace", "spread"),
    broken("second turn takes the first's weight rows", TURN_ROW, "row = tile * L1_ROWS",
           "wrong bits"),
    broken("second turn takes the first's weight scales",
           "linear1(ctx, rings, step, steps, row0 + HALF_N",
           "linear1(ctx, rings, step, steps, row0", "wrong bits", NARROW),
    broken("weight scales of the first tile", "(2 * spec.padded_intermediate) + row0",
           "(2 * spec.padded_intermediate)", "wrong bits", NARROW),
    broken("weight scales of the first expert", "expert * (2 * spec.padded_intermediate)",
           "0 * (2 * spec.padded_intermediate)", "wrong bits", NARROW),
    broken("weights of one turn", f"for turn in {TURNS}", "for turn in range(1)", "Deadlock"),
    broken("tokens of one turn", f"for _ in {TURNS}", "for _ in range(1)", "Deadlock"),
    broken("maxima not alternated", "first = (count & 1) * MATH_PARTITIONS", "first = 0",
           "SharedMemoryRace"),
    broken("maxima read without waiting", WAIT_MAXIMA, "first + 0",
           "SharedMemoryRace or UnwrittenRead"),
    broken("maxima announced before they are stored",
           f"{STORE_MAXIMA} cta_barrier() {ARRIVE_MAXIMA}",
           f"{ARRIVE_MAXIMA}\n        {STORE_MAXIMA}", "SharedMemoryRace or UnwrittenRead"),
    broken("L1 tiles not counted", "l1_count += 1", "l1_count += 0",
           "SharedMemoryRace or UnwrittenRead or BarrierFault"),
    broken("neighbour's maxima not used", "gl.maximum(amax, other)", "amax", "wrong bits"),
    *(broken(f"{half} half left out of the scale, {s}", BIGGEST, f"gl.maximum({x}, -{x})",
             "wrong bits", s)
      for s in ("calls", "fp8 wide", WIDE) for half, x in (("second", "low"), ("first", "high"))),
    *(broken(f"second half of L1's output stored over the first, {s}", UPPER_COLUMNS,
             UPPER_COLUMNS.replace("+ H_GROUP // 2", ""), "wrong bits or UnwrittenRead", s)
      for s in ("calls", "fp8 wide")),
    broken("first half not set aside", "rings.aside.index(PART).store(low)", "pass",
           "UnwrittenRead", WIDE),
    broken("first half of the other partition", ASIDE, ASIDE.replace("PART", "1 - PART"),
           "UnwrittenRead or SharedMemoryRace", WIDE),
]  # fmt: skip

# --- MXFP4: the expander of wide tiles, the math of narrow ones, and the loader of weights ------

CODES_WAIT = "mbarrier.wait(rings.packed_full.index(source), (p // spec.packed_stages) & 1)"
LAST = "last = GROUPS * p + 1"
FREE_WAIT = "mbarrier.wait(rings.empty.index(last % spec.stages), ((last // spec.stages) & 1) ^ 1)"
FULL = "mbarrier.arrive(rings.full.index(first), count=1)"
FULL_TOO = "mbarrier.arrive(rings.full.index(first + 1), count=1)"
FREED = "mbarrier.arrive(rings.packed_empty.index(source), count=1)"
FIRST = "first = GROUPS * p % spec.stages"
EXPAND, EXPAND_TOO = "expand_group(rings, source, first, 0,", "source, first + 1, 1, spec)"
NEXT_SOURCE = "gl.where(source == spec.packed_stages - 1, 0, source + 1)"
PASS_BY = "step = pass_by(rings, step, stages, spec.stages)"
EXPANDED_STEPS = "steps = steps_of_task(kind, spec) pair = expand_tile("
# offsets of mxfp4, scales of fp8_block
FACTORS_LOAD = "(expert * STEPS + k) * spec.factor_rows"
FACTORS_ROW = "tma_load(factors, [factor, row],"
FENCED = "fence_async_shared() cta_barrier() mbarrier.arrive(rings.full.index(first),"
LOAD_REST = "ctx.w1, ctx.w1_factor, expert, row, rings, step, {}, last, rows"
ROW_WORDS = "plain.index((stage * spec.factor_rows + G) * MATH_PARTITIONS + PART)"
WORDS = "low0 + zero, low1 + zero, high0 + zero, high1 + zero"
CODES_OF = "codes.slice(G * K_GROUP // 2, 32, 1)"
HIGH_CODES = "codes.slice(G * K_GROUP // 2 + 32, 32, 1)"
CODE_ROWS = "codes = rings.w.index(stage).slice(PART * ROWS"
TOKENS_OF = "x = rings.x.index(stage).slice(G * K_GROUP, K_GROUP, 1)"
JOINED = "gl.join(k0, k32)"
HALVES = "gl.join(gl.join(k0, k32), gl.join(k64, k96))"


expander = part("expander", WIDE)
narrow = part("narrow", NARROW)
either = in_each(NARROW, WIDE)


def too_soon(name: str, arrival: str, caught_as: str) -> Mutation:
    """The arrival made before the stage is expanded."""
    early = f"{FIRST}\n        {arrival}\n        expand_group"
    edits = ((arrival, "p + 0"), (f"{FIRST} expand_group", early))
    return Mutation(f"expander: {name}", edits, caught_as, WIDE)


EXPANDERS = [
    expander("expanded without a fence", FENCED,
             FENCED.removeprefix("fence_async_shared() ").replace(" m", "\n        m"),
             "ProxyFault"),
    expander("codes are not waited for", CODES_WAIT, "p + 0", "UnwrittenRead or SharedMemoryRace"),
    expander("codes read a phase early", CODES_WAIT, CODES_WAIT.replace(") & 1", ") & 1 ^ 1"),
             "UnwrittenRead or SharedMemoryRace"),
    expander("operands written over", FREE_WAIT, "p + 0", "SharedMemoryRace or BarrierFault"),
    expander("second stage not waited for", LAST, LAST.replace(" + 1", ""),
             "SharedMemoryRace or BarrierFault"),
    expander("stage expanded a phase late", FREE_WAIT, FREE_WAIT.replace(" ^ 1", ""), "Deadlock"),
    too_soon("codes given back before they are read", FREED, "SharedMemoryRace"),
    too_soon("stage full before it is expanded", FULL, "SharedMemoryRace or UnwrittenRead"),
    expander("codes not given back", FREED, "p + 0", "Deadlock"),
    expander("stage not filled", FULL, "p + 0", "Deadlock"),
    expander("second stage not filled", FULL_TOO, "p + 0", "Deadlock"),
    expander("into the next stage", EXPAND, EXPAND.replace("first", "first + 1"),
             "SharedMemoryRace or UnwrittenRead"),
    expander("second stage into the first", EXPAND_TOO, EXPAND_TOO.replace(" + 1", ""),
             "SharedMemoryRace or UnwrittenRead"),
    expander("first group for both", EXPAND_TOO, EXPAND_TOO.replace("1, spec", "0, spec"),
             "wrong bits"),
    expander("from the next stage", EXPAND, EXPAND.replace("source", "1 - source"),
             "SharedMemoryRace or UnwrittenRead"),
    expander("always from the first stage", NEXT_SOURCE, "source",
             "SharedMemoryRace or UnwrittenRead or Deadlock or BarrierFault"),
    expander("offsets of another stage", "plain.index(source *", "plain.index((1 - source) *",
             "SharedMemoryRace or UnwrittenRead"),
    expander("offsets of the first group for both", "plain.index(source * GROUPS + G)",
             "plain.index(source * GROUPS)", "wrong bits"),
    expander("offsets of the first half for both", ">> (16 * half)", ">> (0 * half)", "wrong bits"),
    expander("one turn of two", EXPANDED_STEPS,
             EXPANDED_STEPS.replace("spec)", "spec) // spec.l1_turns\n       "), "Deadlock"),
    expander("stages of a tile forgotten", "return pair + pairs",
             "return pair",
             "SharedMemoryRace or BarrierFault or Deadlock or wrong bits"),
    expander("packed_full: two arrivals", "packed_full.index(i), count=1",
             "packed_full.index(i), count=2", "Deadlock"),
    expander("packed_empty: two arrivals", "packed_empty.index(i), count=1",
             "packed_empty.index(i), count=2", "Deadlock"),
    expander("task_empty: it does not count", TASK_EMPTY,
             TASK_EMPTY.replace("spec.expanders", "0"), "SharedMemoryRace or BarrierFault"),
    expander("task_empty: one more", TASK_EMPTY,
             TASK_EMPTY.replace("expanders", "expanders + 1"), "Deadlock"),
    narrow("offsets of the stage's first block", ROW_WORDS, ROW_WORDS.replace(" + G", "")),
    narrow("offsets of another stage", ROW_WORDS,
           ROW_WORDS.replace("stage *", "(stage + 1) % spec.stages *"),
           "SharedMemoryRace or UnwrittenRead"),
    narrow("offsets of the other partition's rows", ROW_WORDS,
           ROW_WORDS.replace("PART)", "1 - PART)")),
    narrow("offsets of the first half for both", "offsets >> 16)", "offsets >> 0)"),
    narrow("codes of the stage's first group", CODES_OF, CODES_OF.replace("G *", "0 *")),
    narrow("codes of the group's first half", HIGH_CODES, CODES_OF),
    narrow("codes of the other partition's rows", CODE_ROWS,
           CODE_ROWS.replace("PART", "(1 - PART)")),
    narrow("tokens of the stage's first group", TOKENS_OF,
           TOKENS_OF.replace("G * K_GROUP,", "0,")),
    narrow("low codes and high ones swapped", JOINED, "gl.join(k32, k0)"),
    narrow("halves of a group swapped", HALVES, "gl.join(gl.join(k64, k96), gl.join(k0, k32))"),
    *either("offset of the low block for the high one", "(offsets >> 8) & 0xFF", "offsets & 0xFF"),
    *either("tables of the low block for the high one", WORDS, WORDS.replace("high", "low")),
    *either("tables of the high block for the low one", WORDS, WORDS.replace("low", "high")),
    *either("offsets of the tile's first block loaded", FACTORS_LOAD,
            FACTORS_LOAD.replace(" + k", "")),
    *either("offsets of the first expert loaded", FACTORS_LOAD,
            FACTORS_LOAD.replace("expert", "0")),
    *either("offsets of the first tile loaded", FACTORS_ROW, FACTORS_ROW.replace("row", "0")),
    *either("bytes of the offsets not expected", "spec.packed_bytes, spec.packed_stages",
            "spec.stage_bytes_w, spec.packed_stages", "BarrierFault or SharedMemoryRace"),
    broken("first stage loaded twice", LOAD_REST.format("k"), LOAD_REST.format("0"),
           "Deadlock or wrong bits or BarrierFault"),
    broken("first stage not loaded", "step, 0, k, rows", "step, k, k, rows", "Deadlock"),
    broken("first stage of the second turn not loaded", "k = 0 if", "k = turn\n                if",
           "Deadlock"),
]  # fmt: skip

# --- wide tiles: a partition without tokens -----------------------------------------------------

IDLE = "PART * ROWS >= valid"
PASSED = "give_back(rings, step, STAGES) step += 1 return step"
PASSING = "for _ in range(stages): take_stage(rings, step, STAGES)"
SECOND_HALF = "(spec.block_m > BOX) and (valid > BOX)"
WIDE_TILES = [
    broken("rows of the second half not loaded", SECOND_HALF,
           SECOND_HALF.replace("valid > BOX", "valid > BOX + 1"), "UnwrittenRead", "half"),
    broken("bytes of a whole block expected for half of one", "half_bytes + scale_bytes",
           "spec.stage_bytes_x + scale_bytes", "Deadlock", "fp8 wide"),
    broken("second half loaded into the first", "x.slice(spec.block_m - BOX, BOX, 0)",
           "x.slice(0, BOX, 0)", "SharedMemoryRace or UnwrittenRead", "half"),
    broken("a partition with a token passes by", IDLE, "PART * ROWS + 1 >= valid",
           "UnwrittenRead or wrong bits", "half"),
    broken("a partition without tokens does not wait", PASSING,
           "for _ in range(stages):\n        step + 0",
           "SharedMemoryRace or BarrierFault or Deadlock", "fp8 wide"),
    broken("a partition without tokens holds the stage", PASSED, "step += 1\n    return step",
           "Deadlock", "fp8 wide"),
    broken("stages passed by forgotten", PASSED,
           "give_back(rings, step, STAGES)\n    return step",
           "Deadlock or BarrierFault or SharedMemoryRace", "fp8 wide"),
    broken("a partition without tokens passes by one turn of two", PASS_BY,
           PASS_BY.replace("stages,", "stages // spec.l1_turns,"),
           "Deadlock or BarrierFault or SharedMemoryRace", "fp8 wide"),
    broken("a partition without tokens holds the stage, fp8 halves", PASSED,
           "step += 1\n    return step", "Deadlock", FP8_HALVES),
]  # fmt: skip

# --- weight scales of fp8_block, which come with their stage ------------------------------------

SCALES_OF = "first = (stage * spec.factor_rows + G) * FOURS"
UPPER = "fours.index(first + UP // 4)"
NEXT = "(stage + 1) % spec.stages *"
BLOCKS = ("fp8_block", "fp8_block wide")  # weights first in pairs of products; tokens first
scales = in_each(*BLOCKS)
SCALES = [
    *scales("scales of the first expert loaded", FACTORS_LOAD, FACTORS_LOAD.replace("expert", "0")),
    *scales("scales of the tile's first block loaded", FACTORS_LOAD,
            FACTORS_LOAD.replace(" + k", "")),
    *scales("scales of the first tile loaded", FACTORS_ROW, FACTORS_ROW.replace("row", "0")),
    broken("scales of the next stage, fp8_block", ROW_WORDS, ROW_WORDS.replace("stage *", NEXT),
           "SharedMemoryRace or UnwrittenRead", BLOCKS[0]),
    broken("scales of the next stage, fp8_block wide", SCALES_OF,
           SCALES_OF.replace("stage *", NEXT), "SharedMemoryRace or UnwrittenRead", BLOCKS[1]),
    broken("scales of the stage's first block", ROW_WORDS, ROW_WORDS.replace(" + G", ""),
           "wrong bits", BLOCKS[0]),
    broken("gate's scale for up", UPPER, UPPER.replace(" + UP // 4", ""), "wrong bits", BLOCKS[1]),
]  # fmt: skip

# --- the order of tiles -------------------------------------------------------------------------

L2_BEGIN = "l2 = (gl.program_id(0) + programs - l1_end % programs) % programs"
EARLIER = "place_of_l1(l1, lag, spec) < place_of_l2(l2, lag, blocks, spec)"

ORDER = [
    broken("L2 before L1", EARLIER, EARLIER.replace("<", ">"), "Deadlock"),
    broken("L2 tiles are lost", L2_BEGIN, L2_BEGIN.replace(") % programs", ")"), "Deadlock"),
    broken("L2 tiles are nobody's or two programs'", L2_BEGIN,
           "l2 = gl.maximum(gl.program_id(0) - l1_end % programs, 0)", "wrong shares", "walk"),
    broken("L2 begins at the first program", L2_BEGIN, "l2 = gl.program_id(0)",
           "wrong shares", "walk"),
    broken("L2 begins a program late", L2_BEGIN, L2_BEGIN.replace("+ programs", "+ programs + 1"),
           "wrong shares", "walk"),
    broken("L2 begins after the L1 tiles the wrong way round", L2_BEGIN,
           L2_BEGIN.replace("programs - l1_end % programs", "l1_end % programs"),
           "wrong shares", "walk"),
    broken("L2 trails by a block less", "gl.minimum(tile // c2 + 1 + lag, blocks) * c1",
           "gl.minimum(tile // c2 + lag, blocks) * c1", "wrong shares", "walk"),
]  # fmt: skip

# --- e4m3 moved to another scale, against rational arithmetic ----------------------------------

rebase = part("rebase", "rebase", "wrong codes or wrong counts")
SIXTEENTH = "sixteenth, 0x2c002c00"
LOW, HIGH = "and.b32 a, a, 0x04000400", "and.b32 b, b, 0x08000800"
UP = "(gl.minimum(s, 19) + 11) << 10"
REBASE = [
    rebase("low half compared at 1 / 8", SIXTEENTH, "sixteenth, 0x2c003000"),
    rebase("high half compared at 1 / 8", SIXTEENTH, "sixteenth, 0x30002c00"),
    rebase("high codes taken a byte low", "shr.u32 t, $2, 16", "shr.u32 t, $2, 8"),
    rebase("high codes put a byte low", "shl.b32 t, t, 16", "shl.b32 t, t, 8"),
    rebase("first byte not counted", LOW, LOW.replace("0x04000400", "0x04000000")),
    rebase("second byte not counted", LOW, LOW.replace("0x04000400", "0x00000400")),
    rebase("third byte not counted", HIGH, HIGH.replace("0x08000800", "0x08000000")),
    rebase("fourth byte not counted", HIGH, HIGH.replace("0x08000800", "0x00000800")),
    rebase("bytes counted twice", LOW, LOW.replace("0x04000400", "0x0c000400")),
    rebase("bytes counted as others", HIGH, HIGH.replace("0x08000800", "0x04000400")),
    rebase("exponent of 2^-s", "(15 - s) << 10", "(14 - s) << 10"),
    rebase("place of the exponent of 2^-s", "(15 - s) << 10", "(15 - s) << 11"),
    rebase("2^-15 as a normal number", "gl.where(s < 15,", "gl.where(s < 16,"),
    rebase("2^-s below 2^-14", "(1 << 24) >> s", "(1 << 23) >> s"),
    rebase("2^-s for one of two", "down | (down << 16)", "down"),
    rebase("exponent of 2^(s - 4)", UP, UP.replace("11", "12")),
    rebase("place of the exponent of 2^(s - 4)", UP, UP.replace("<< 10", "<< 9")),
    rebase("2^(s - 4) infinite", UP, UP.replace("19", "20")),
    rebase("2^(s - 4) too small", UP, UP.replace("19", "16")),
    rebase("2^(s - 4) for one of two", "up | (up << 16)", "up"),
    rebase("shifts without an end", "s = gl.minimum(shift, 31)", "s = shift", "Overflow"),
]  # fmt: skip

# --- counters from call to call ----------------------------------------------------------------


def not_cleared(region: str, offset: str, count: str, caught_as: str) -> Mutation:
    line = f"clear(ctx.region(spec.offset.{region}, gl.int32) + {offset}, {count}, layout)"
    return broken(f"{region} not cleared", line, "pass", caught_as)


COUNTERS = [
    not_cleared("send_counts", "other * spec.experts", "spec.experts", "DataRace or Deadlock"),
    not_cleared("arrived", "blocks", "used_blocks", "DataRace or UnwrittenRead"),
    not_cleared("l1_done", "blocks", "used_blocks", "DataRace or UnwrittenRead"),
    not_cleared("l2_done", "blocks", "used_blocks", "Deadlock or DataRace"),
    not_cleared("token_arrivals", "tokens", "used_tokens", "DataRace or UnwrittenRead"),
    broken("used blocks not recorded",
           "gl.store(control + CONTROL_USED_BLOCKS + ctx.counter_set, blocks)", "pass",
           "DataRace or UnwrittenRead"),
    broken("used tokens not recorded",
           "gl.store(control + CONTROL_USED_TOKENS + ctx.counter_set, ctx.tokens)", "pass",
           "DataRace or UnwrittenRead"),
    broken("arrivals of programs not cleared", "gl.store(control + CONTROL_COUNTED, 0)", "pass",
           "Deadlock"),
    broken("call not counted", "gl.store(control + CONTROL_EPOCH, ctx.epoch)", "pass",
           "DataRace or Deadlock"),
    broken("one set of counters", "rank, tokens, epoch, epoch & 1,", "rank, tokens, epoch, 0,",
           "DataRace or Deadlock or UnwrittenRead"),
    broken("claims not cleared", "gl.store(claimed + gl.program_id(0), 0)", "pass",
           "wrong bits", "long"),
    broken("claims taken over and over", "claim = ahead return event", "return event",
           "DataRace or wrong bits", "long"),
    broken("tokens numbered from 1", "[:, None] < key[None, :]", "[:, None] <= key[None, :]",
           "DataRace or wrong bits", "long"),
    broken("the first tokens for every claim", "own_tokens(ctx, claim // shares, layout) start",
           "own_tokens(ctx, 0, layout)\n        start", "DataRace or wrong bits", "long"),
    broken("padding rows not counted", "signal_rows(arrived + block, 1 + padding, real)",
           "signal_rows(arrived + block, 1, real)", "Deadlock"),
]  # fmt: skip

# --- rows of several steps ----------------------------------------------------------------------

AHEAD_WORDS = "gl.load(src + (i + AHEAD) * (width * 8), mask=mask & more, other=0)"
AHEAD_CODES = "gl.load(codes_of_step + (i + AHEAD) * width,"
AHEAD_BYTES = "gl.load(src + (i + 3) * width, mask=copy & (i + 3 < STEPS), other=0)"
PULLS = [
    *(broken(f"a step of a row skipped, {s}", AHEAD_WORDS,
             AHEAD_WORDS.replace("AHEAD", "AHEAD + 1"), "wrong bits", s)
      for s in ("steps", "steps wide")),
    *(broken(f"codes of the first step for all, {s}", AHEAD_CODES,
             "gl.load(codes_of_step + 0 * width,", "wrong bits", s)
      for s in ("steps", "steps wide")),
    broken("last step of a row not loaded", "more = i + AHEAD < STEPS",
           "more = i + AHEAD < STEPS - 1", "wrong bits", "steps"),
    broken("a step's words used twice", "second = third third = words", "third = words",
           "wrong bits", "steps"),
    broken("a step's codes used twice", "code2 = code3", "pass", "wrong bits", "steps"),
    broken("second step of a row not loaded", "mask=mask & (STEPS > 1)", "mask=mask & (STEPS > 9)",
           "wrong bits", "steps"),
    broken("a step of bytes skipped", AHEAD_BYTES, AHEAD_BYTES.replace("i + 3) *", "i + 4) *"),
           "wrong bits", "steps of bytes"),
    broken("last step of bytes not loaded", AHEAD_BYTES, AHEAD_BYTES.replace("STEPS", "STEPS - 1"),
           "wrong bits", "steps of bytes"),
    broken("a step's bytes used twice", "second = third third = gl.load(src + (i + 3)",
           "third = gl.load(src + (i + 3)", "wrong bits", "steps of bytes"),
]  # fmt: skip

# --- the rehearsal ------------------------------------------------------------------------------

REHEARSAL_LAST = "last = gl.where(kind == REHEARSAL, 1, steps)"
REHEARSAL_STEPS = "gl.where(kind == REHEARSAL, spec.l1_turns * spec.rehearsal_steps, steps)"
REHEARSAL = [
    broken("rehearsal with the rows of a block", "gl.where(kind == REHEARSAL, spec.ring_rows, row)",
           "row", "DataRace or UnwrittenRead or ProxyFault"),
    broken("rehearsal with rows for one partition",
           "gl.where(kind == REHEARSAL, spec.block_m, valid)", "valid", "UnwrittenRead",
           "fp8 wide"),
    broken("rehearsal loads two stages of weights", REHEARSAL_LAST,
           REHEARSAL_LAST.replace("1, s", "2, s"), "wrong bits or Deadlock", "mxfp4"),
    broken("rehearsal takes a stage more than it loads", REHEARSAL_STEPS,
           REHEARSAL_STEPS.replace("spec.rehearsal_steps", "(spec.rehearsal_steps + 1)"),
           "Deadlock or BarrierFault", "mxfp4"),
    broken("rehearsal signalled as an L2 tile", "elif kind == LINEAR2: signal_partials(",
           "else:\n            signal_partials(",
           "DataRace or Deadlock or wrong bits or UnwrittenRead"),
    broken("rehearsal counted as an L1 tile", "if kind == LINEAR1: signal_tile(",
           "if kind != LINEAR2:\n            signal_tile(",
           "DataRace or UnwrittenRead or ProxyFault"),
]  # fmt: skip

# --- MXFP4 in long calls: unpacked by dispatch ---------------------------------------------------

unpack = part("unpack", "unpacked")
SHARES = "unpacked_of(ctx, expert), gl.num_programs(0)"
W2_WAIT = "if spec.unpacks: wait_unpacked(ctx, expert) step = load_weight_tile("
RACE = "DataRace or UnwrittenRead or ProxyFault"

UNPACKS = [
    unpack("not waited for", SHARES, SHARES.replace("gl.num_programs(0)", "0"), RACE),
    unpack("a program not waited for", SHARES, f"{SHARES} - 1", RACE),
    unpack("L2's matrix not waited for", W2_WAIT, "step = load_weight_tile(", RACE),
    unpack("no fence before it is loaded",
           "PHASE_UNPACKED, expert, spec.timeout_ns) fence_async_proxy(seen)",
           "PHASE_UNPACKED, expert, spec.timeout_ns)", "ProxyFault"),
    unpack("not announced", "signal_tile(unpacked_of(ctx, expert))", "pass", "Deadlock"),
    unpack("the first expert twice", "blocks, gl.to_tensor(1), event",
           "blocks, gl.to_tensor(0), event", RACE),
    unpack("experts without rows of this program's",
           "unpack_until(ctx, unpacked, spec.experts_per_rank,", "unpack_until(ctx, unpacked, 0,",
           "Deadlock"),
    unpack("an expert too late", "gl.sum(gl.where(e == expert, rows, 0), 0) > 0",
           "gl.sum(gl.where(e == expert, rows, 0), 0) > 1", "Deadlock"),
    unpack("L1's codes of the first expert", "ctx.w1_codes + e *", "ctx.w1_codes + 0 * e *",
           "wrong bits"),
    unpack("L1's offsets of the first expert", "ctx.w1_offset + e *", "ctx.w1_offset + 0 * e *",
           "wrong bits"),
    unpack("L2's codes of the first expert", "ctx.w2_codes + e *", "ctx.w2_codes + 0 * e *",
           "wrong bits"),
    unpack("L2's offsets of the first expert", "ctx.w2_offset + e *", "ctx.w2_offset + 0 * e *",
           "wrong bits"),
    unpack("L2's matrices over L1's", "e * SIZE2 + spec.experts_per_rank * SIZE1", "e * SIZE2",
           RACE),
    unpack("offsets of the first half for both", "16 * (block % 2)", "0 * (block % 2)",
           "wrong bits"),
    unpack("offsets of the first blocks", "(block // 2 * HEIGHT + row)", "(block * 0 + row)",
           "wrong bits"),
    unpack("high values over the low", "target + (place + 32)", "target + place",
           "UnwrittenRead or wrong bits"),
    unpack("counters not cleared", "if WORDS > 0:", "if WORDS < 0:", RACE),
    unpack("counters not cleared by a call that does not unpack", "if WORDS > 0:",
           "if WORDS > 0 and spec.unpacks:", RACE),
    unpack("counters cleared short", "other * WORDS, WORDS,", "other * WORDS, WORDS - 1,", RACE),
    unpack("counters of one set", "ctx.counter_set * (ctx.spec.offset.unpacked_set // 4)",
           "0 * (ctx.spec.offset.unpacked_set // 4)", f"{RACE} or Deadlock"),
]  # fmt: skip

TILES = [*EPILOGUE, *EXPANDERS, *WIDE_TILES, *SCALES]
MUTATIONS = [
    *WAITS,
    *SIGNALS,
    *MBARRIERS,
    *RINGS,
    *TILES,
    *ORDER,
    *REBASE,
    *PULLS,
    *REHEARSAL,
    *UNPACKS,
    *COUNTERS,
]

# (mutation, why nothing comes to light)
NOT_CAUGHT = [
    (
        Mutation(
            "stage released while loads of its scales are under way",
            (*NO_LATE_RELEASE,
             (f"{PRODUCT} {RELEASE}", f"{PRODUCT}\n        {NOW}")),
            "", "fp8 long",
        ),
        "a load is done at once; megamoe.sass looks for this in the machine code",
    ),
    (
        broken("rows signalled before all warps stored",
               "cta_barrier() gl.atomic_add(flags, amounts", "gl.atomic_add(flags, amounts",
               ""),
        "a tensor of flags is taken to be signalled by the threads that stored what it announces",
    ),
    (
        broken("tile done before all warps stored",
               "cta_barrier() mbarrier.arrive(rings.tile_done",
               "mbarrier.arrive(rings.tile_done", ""),
        "an arrival at an mbarrier is taken for that of the whole partition",
    ),
    (
        broken("task announced before all lanes wrote it",
               "cta_barrier() mbarrier.arrive(rings.task_full", "mbarrier.arrive(rings.task_full",
               ""),
        "an arrival at an mbarrier is taken for that of the whole partition",
    ),
    (
        broken("stage full before all warps expanded it", FENCED,
               FENCED.replace(" cta_barrier()", "\n       "), "", WIDE),
        "an arrival at an mbarrier is taken for that of the whole partition",
    ),
    (
        broken("maxima announced before all warps stored them", f"cta_barrier() {ARRIVE_MAXIMA}",
               ARRIVE_MAXIMA, ""),
        "an arrival at an mbarrier is taken for that of the whole partition",
    ),
    (
        broken("weights on their way without a limit", "if spec.in_flight < spec.packed_stages:",
               "if spec.packed_stages < 0:", ""),
        "the wait is for speed alone: stages are taken in turn, and free_stage guards each",
    ),
    (
        broken("weights do not let the first rows pass", GATE_WAIT,
               GATE_WAIT.replace("spec.block_m", "0"), ""),
        "weights depend on nobody: the wait is for speed alone",
    ),
    (
        broken("scales of the other partition's rows", ROW_WORDS,
               ROW_WORDS.replace("PART)", "1 - PART)"), "", BLOCKS[0]),
        "both halves of a tile lie in the same 128 x 128 blocks, gate and up alike",
    ),
    (
        rebase("2^(s - 4) just large enough", UP, UP.replace("19", "17")),
        "from 2^-18 on every value changes, whatever it is compared with",
    ),
    (
        broken("L1 of the first blocks far ahead", "gl.maximum(block - lag, 0) * c2",
               "(block - lag) * c2", "", "walk"),
        "nothing of L2 comes before them, wherever they stand",
    ),
    (
        broken("L2 of the last blocks far behind", "gl.minimum(tile // c2 + 1 + lag, blocks) * c1",
               "(tile // c2 + 1 + lag) * c1", "", "walk"),
        "they come after the last L1 tile and among themselves in turn, wherever they stand",
    ),
    (
        broken("lag of a longer call", "lag = gl.minimum(blocks, spec.lag)", "lag = spec.lag", "",
               "walk"),
        "the order is the same with any lag of at least the call's blocks",
    ),
    (
        broken("counts read before all lanes acquired",
               "cta_barrier() return gl.min(((seen", "return gl.min(((seen", ""),
        "a partition is one task: what one of its threads has acquired, all have",
    ),
    (
        weaker("arrivals at gpu scope", LAST, "scope=SCOPE", 'scope="gpu"', ""),
        "the arriving programs are on one GPU, and what the last one signals to peers is at "
        "system scope and covers what it has seen",
    ),
]  # fmt: skip
