"""Broken protocols are found: mutations of the kernel's synchronisation, each caught in 100 seeds.

Each row of MUTATIONS breaks one thing that the protocol (table at the head of kernel/sync.py) or a
ring in shared memory relies on, and says how it must come to light: the class of the interpreter's
error, `MegaMoEError` where the kernel itself gives up, or `wrong bits`. NOT_CAUGHT lists mutations
that the interpreter cannot see, with the reason.

Why the grid is enough: every wait, every signal (order, scope, fence, barrier), every mbarrier
(count, bytes, phase) and every counter that is cleared or recorded is broken at least once, alone.
Each runs in the smallest scene in which it matters: calls that follow each other on two ranks
(a set of counters comes back in the third), a block whose rows arrive one after another, tiles of
which L2 has several, a pool with more blocks than its ring. The unmutated copy passes every scene
with the same seeds, so a mutation is caught for what it breaks.
"""

from __future__ import annotations

import importlib
import itertools
import re
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import pytest
import torch
from helpers import Layer, Routing, live_blocks, make_call, make_config, run_back_to_back, same_bits

import megamoe.kernel
import megamoe.launch
from megamoe.config import MoEConfig
from megamoe.interpreter import KernelError
from megamoe.symmetric import MegaMoEError

pytestmark = pytest.mark.slow

SEEDS = 100
UNMUTATED_SEEDS = 5
NUMBERS = itertools.count()


@dataclass(frozen=True)
class Mutation:
    """edits: (old text, new text); each old one occurs once in the kernel, in any layout."""

    name: str
    edits: tuple[tuple[str, str], ...]
    caught_as: str  # names, separated by blanks or " or "
    scene: str = "calls"


def broken(name: str, old: str, new: str, caught_as: str, scene: str = "calls") -> Mutation:
    return Mutation(name, ((old, new),), caught_as, scene)


# --- waits that are missing or too short -------------------------------------------------------

WAITS = [
    broken(
        "L1 does not wait for rows", "wait_gpu(arrived + block, spec.block_m,",
        "wait_gpu(arrived + block, 0,", "UnwrittenRead or DataRace",
    ),
    broken(
        "L1 waits for a row less", "wait_gpu(arrived + block, spec.block_m,",
        "wait_gpu(arrived + block, spec.block_m - 1,", "UnwrittenRead or DataRace", "crowded",
    ),
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
    broken("combine does not wait", "wait_sys(arrivals + token, active,",
           "wait_sys(arrivals + token, active * 0,", "UnwrittenRead or DataRace"),
    broken("combine waits for one partial", "wait_sys(arrivals + token, active,",
           "wait_sys(arrivals + token, gl.minimum(active, 1),", "UnwrittenRead or DataRace"),
    broken("signal does not wait for the math", "mbarrier.wait(rings.tile_done.index(", "max((",
           "DataRace"),
]  # fmt: skip

# --- order, scope, barriers and fences of signals ----------------------------------------------

POLL = "ld.acquire.SCOPE.global.b32 v, [$1];"
POLL_SYS = 'POLL_SYS = gl.constexpr(_POLL.replace("SCOPE", "sys"))'
TILE = 'gl.atomic_add(flag, 1, sem="release", scope="gpu")'
ROWS = 'gl.atomic_add(flags, amounts, mask=mask, sem="release", scope="gpu")'
LAST = 'gl.atomic_add(flag, 1, sem="acq_rel", scope=SCOPE) == last'
PEERS = 'gl.atomic_add(flags, mask.to(gl.int32), mask=mask, sem="release", scope="sys")'
FLAGS = 'gl.atomic_xchg(flags, value, mask=mask, sem="release", scope="sys")'
L2_LAST = "arrive_last(l2_done + block, spec.l2_tiles - 1, scope)"
L2_UNORDERED = 'gl.atomic_add(l2_done + block, 1, sem="{}", scope="sys") == spec.l2_tiles - 1'
FENCE = "fence_async_proxy(every_thread())"
STORE_H = "gl.store(target, stored, mask=(token < valid)[None, :])"
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

EXPECT = "mbarrier.expect(rings.full.index(stage), BYTES"
TASK_EMPTY = "task_empty.index(i), count=partitions + 3"
TASK_WAIT = "mbarrier.wait(rings.task_empty.index(slot), ((i // TASK_SLOTS) & 1) ^ 1)"
TASK_READ = "mbarrier.wait(rings.task_full.index(slot), (i // TASK_SLOTS) & 1)"
EMPTY_COUNT = "mbarrier.init(empty.index(i), count=partitions"

MBARRIERS = [
    broken("full: one arrival", "mbarrier.init(full.index(i), count=2)",
           "mbarrier.init(full.index(i), count=1)", "UnwrittenRead or BarrierFault"),
    broken("full: three arrivals", "mbarrier.init(full.index(i), count=2)",
           "mbarrier.init(full.index(i), count=3)", "Deadlock"),
    broken("empty: a partition less", EMPTY_COUNT, f"{EMPTY_COUNT} - 1",
           "SharedMemoryRace or BarrierFault"),
    broken("empty: a partition more", EMPTY_COUNT, f"{EMPTY_COUNT} + 1", "Deadlock"),
    broken("task_empty: a reader less", TASK_EMPTY, TASK_EMPTY.replace("3", "2"),
           "SharedMemoryRace or BarrierFault"),
    broken("task_empty: a reader more", TASK_EMPTY, TASK_EMPTY.replace("3", "4"), "Deadlock"),
    broken("task_full: two arrivals", "task_full.index(i), count=1",
           "task_full.index(i), count=2", "Deadlock"),
    broken("tile_done: a partition less", "tile_done.index(i), count=partitions",
           "tile_done.index(i), count=partitions - 1", "DataRace or BarrierFault"),
    broken("tile_done: a partition more", "tile_done.index(i), count=partitions",
           "tile_done.index(i), count=partitions + 1", "Deadlock"),
    broken("amax_full: one arrival", "amax_full.index(i), count=2", "amax_full.index(i), count=1",
           "SharedMemoryRace or UnwrittenRead"),
    broken("fewer bytes expected", EXPECT, f"{EXPECT} - 16", "BarrierFault or SharedMemoryRace"),
    broken("more bytes expected", EXPECT, f"{EXPECT} + 16", "Deadlock"),
    broken("bytes of the scales not expected", "spec.stage_bytes_x + scale_bytes, spec.stages",
           "spec.stage_bytes_x, spec.stages", "BarrierFault"),
    broken("stage read a phase early", "(step // STAGES) & 1) return stage",
           "((step // STAGES) & 1) ^ 1)\n    return stage", "UnwrittenRead or SharedMemoryRace"),
    broken("stage filled a phase late", "((step // STAGES) & 1) ^ 1)", "(step // STAGES) & 1)",
           "Deadlock"),
    broken("task read a phase early", TASK_READ, TASK_READ.replace(" & 1", " & 1 ^ 1"),
           "UnwrittenRead or SharedMemoryRace"),
    broken("task slot written again at once", TASK_WAIT, "slot = slot + 0",
           "SharedMemoryRace or Deadlock or BarrierFault", "ring"),
    broken("tile_done waited for in one phase",
           "rings.tile_done.index(i % TASK_SLOTS), (i // TASK_SLOTS) & 1",
           "rings.tile_done.index(i % TASK_SLOTS), 0", "DataRace or Deadlock", "ring"),
]  # fmt: skip

# --- rings in shared memory, and of the pool, handed back too soon -----------------------------

RELEASE = """if g == spec.block_k // GROUP - 1:
                mbarrier.arrive(rings.empty.index(stage), count=1)"""
PRODUCT = "part = warpgroup_mma_wait(0, deps=[part])"
ORIGINS = """origin = gl.load(ctx.region(spec.offset.pool_origin, gl.int64) + slot + row,
            mask=real, other=0, cache_modifier=".cg")"""
SOURCES = "source, entry, real = origin_of(spec, origin, real)"

RINGS = [
    broken("fp8: stage released before WGMMA has read it", f"{PRODUCT} {RELEASE} if W_S",
           f"{RELEASE}\n            {PRODUCT}\n            if W_S", "SharedMemoryRace"),
    broken("bf16: stage released while WGMMA reads it", "warpgroup_mma_wait(1, deps=[acc])",
           "warpgroup_mma_wait(2, deps=[acc])", "SharedMemoryRace", "bf16"),
    broken("mxfp4: stage released after its first groups", "if g == spec.block_k // GROUP - PAIR:",
           "if g == 0:", "SharedMemoryRace or BarrierFault", "mxfp4"),
    broken("maxima not alternated", "half = (count & 1) * spec.math_partitions", "half = 0",
           "SharedMemoryRace"),
    broken("maxima read without waiting", "mbarrier.wait(rings.amax_full.index(group), count & 1)",
           "group + 0", "SharedMemoryRace or UnwrittenRead"),
    broken("origins read after the slot is handed back", f"{ORIGINS} {SOURCES} if {L2_LAST}:",
           f"if {L2_LAST}:\n        {ORIGINS}\n        {SOURCES}", "DataRace", "ring"),
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
    broken("padding rows not counted", "signal_rows(arrived + block, 1 + padding, real)",
           "signal_rows(arrived + block, 1, real)", "Deadlock"),
]  # fmt: skip

MUTATIONS = [*WAITS, *SIGNALS, *MBARRIERS, *RINGS, *COUNTERS]

# (mutation, why nothing comes to light)
NOT_CAUGHT = [
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
        broken("counts read before all lanes acquired",
               "cta_barrier() return gl.min(((seen", "return gl.min(((seen", ""),
        "a partition is one task: what one of its threads has acquired, all have",
    ),
    (
        broken("no fence by the math after L1's output is stored",
               f"{STORE_H} # L2's loaders read this through TMA {FENCE}", STORE_H, ""),
        "the fence of the signal warp, which has seen these stores, covers them",
    ),
    (
        weaker("arrivals at gpu scope", LAST, "scope=SCOPE", 'scope="gpu"', ""),
        "the arriving programs are on one GPU, and what the last one signals to peers is at "
        "system scope and covers what it has seen",
    ),
]  # fmt: skip


# --- scenes ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scene:
    layer: Layer
    programs: int
    tokens: tuple[tuple[int, ...], ...]  # of each call, by rank
    routing: str | Routing = "distinct"

    @property
    def calls(self):
        config = self.layer.config
        return [
            make_call(config, t, seed=80 + i, routing=self.routing)
            for i, t in enumerate(self.tokens)
        ]



def uneven(config: MoEConfig, tokens: int, g: torch.Generator) -> torch.Tensor:
    """5 tokens on one rank and 4 on the other: 1 row for expert 3, 16 for expert 4, 1 for expert 5.

    Dispatch fetches 4 rows at a time, so the last row of the full block comes with the last unit.
    """
    idx = torch.full((tokens, 2), 4)
    if tokens == 5:
        idx[0] = torch.tensor([3, 5])
    return idx


TWO_RANKS = {"ranks": 2, "experts": 6, "capacity": 5}
ONE_RANK = {"experts": 20, "topk": 4, "capacity": 5, "block_m": 128}
SCENES = {
    # a few blocks and tokens, fewer, more: what was not cleared is met again by the third call
    "calls": Scene(Layer(make_config(**TWO_RANKS)), 2, ((3, 2), (1, 0), (4, 3))),
    "prefill": Scene(Layer(make_config(("fp8", "token"), block_m=64, **TWO_RANKS)), 2, ((3, 2),)),
    "bf16": Scene(Layer(make_config(("bf16", "none"), **TWO_RANKS)), 2, ((3, 2),)),
    # two steps a tile: with one, the ring of tasks alone keeps the loaders from running too far
    "mxfp4": Scene(
        Layer(make_config(("mxfp4", "token"), hidden=512, intermediate=512, **TWO_RANKS)),
        1, ((4, 4),),
    ),
    "crowded": Scene(Layer(make_config(("bf16", "none"), **TWO_RANKS)), 2, ((5, 4),), uneven),
    "ring": Scene(Layer(make_config(("fp8", "token"), **ONE_RANK)), 1, ((5,),)),
}


@lru_cache
def expected(name: str) -> list[list[torch.Tensor]]:
    scene = SCENES[name]
    return [scene.layer.model()(**call.arguments) for call in scene.calls]


def test_ring_scene_has_more_blocks_than_its_ring():
    scene = SCENES["ring"]
    plan = scene.layer.model(programs=scene.programs).plan
    assert live_blocks(scene.calls[0], scene.layer.config, 0, 128) > plan.ring_blocks(128)


# --- mutants -----------------------------------------------------------------------------------


def pattern(code: str) -> re.Pattern:
    """Code in any layout: blanks, line breaks and commas at the end of a list do not matter."""
    words = re.findall(r"\w+|[^\w\s]", code)
    return re.compile(r"\s*".join((r",?\s*" if w in ")]" else "") + re.escape(w) for w in words))


def build(edits: tuple[tuple[str, str], ...], folder: Path, monkeypatch):
    """A copy of the kernel's package with the edits; returns its `mega`. compat.py is shared."""
    name = f"mutant_{next(NUMBERS)}"
    source = Path(megamoe.kernel.__file__).parent
    skipped = shutil.ignore_patterns("__pycache__", "compat.py")
    shutil.copytree(source, folder / name, ignore=skipped)
    texts = {path: path.read_text() for path in sorted((folder / name).glob("*.py"))}
    for old, new in edits:
        found = [(path, m) for path, text in texts.items() for m in pattern(old).finditer(text)]
        assert len(found) == 1, f"the kernel has {len(found)} times: {old}"
        path, match = found[0]
        texts[path] = texts[path][: match.start()] + new + texts[path][match.end() :]
    for path, text in texts.items():
        path.write_text(re.sub(r"from megamoe\.kernel\.(?!compat\b)", f"from {name}.", text))
    monkeypatch.syspath_prepend(folder)
    return importlib.import_module(f"{name}.mega")


def outcome(name: str, seed: int) -> str:
    """How the calls of a scene ended: "" if right, else the class of the error or "wrong bits"."""
    scene = SCENES[name]
    moe = scene.layer.model(programs=scene.programs, seed=seed)
    moe._fused.machine.max_steps = 200_000
    try:
        results = run_back_to_back(moe, scene.calls)
    except (KernelError, MegaMoEError) as error:
        print(f"  seed {seed}: {type(error).__name__}: {error}")
        return type(error).__name__
    right = all(same_bits(y, e) for y, e in zip(results, expected(name), strict=True))
    return "" if right else "wrong bits"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda m: m.name)
def test_caught(mutation, tmp_path, monkeypatch):
    expected(mutation.scene)
    monkeypatch.setattr(megamoe.launch, "mega", build(mutation.edits, tmp_path, monkeypatch))
    for seed in range(SEEDS):
        found = outcome(mutation.scene, seed)
        if found:
            print(f"caught with seed {seed} as {found}")
            assert found in mutation.caught_as.split(" or ")
            return
    pytest.fail(f"not caught in {SEEDS} seeds")


@pytest.mark.parametrize(("mutation", "why"), NOT_CAUGHT, ids=lambda v: getattr(v, "name", ""))
def test_not_caught(mutation, why, tmp_path, monkeypatch):
    """If one of these is caught some day, it belongs into MUTATIONS."""
    expected(mutation.scene)
    monkeypatch.setattr(megamoe.launch, "mega", build(mutation.edits, tmp_path, monkeypatch))
    assert [outcome(mutation.scene, seed) for seed in range(3)] == [""] * 3, f"no longer: {why}"


@pytest.mark.parametrize("name", SCENES)
def test_unmutated_copy_passes(name, tmp_path, monkeypatch):
    expected(name)
    monkeypatch.setattr(megamoe.launch, "mega", build((), tmp_path, monkeypatch))
    assert [outcome(name, seed) for seed in range(UNMUTATED_SEEDS)] == [""] * UNMUTATED_SEEDS
