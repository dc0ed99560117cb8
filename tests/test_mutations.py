"""Broken protocols are found: mutations of the kernel's synchronisation, each caught in 100 seeds.

Each row of MUTATIONS (in mutations.py) breaks one thing that the protocol (table at the head of
kernel/sync.py) or a ring in shared memory relies on, and says how it must come to light: the class
of the interpreter's error, `MegaMoEError` where the kernel itself gives up, or `wrong bits`.
NOT_CAUGHT lists mutations that the interpreter cannot see, with the reason.

Why the grid is enough: every wait, every signal (order, scope, fence, barrier), every mbarrier
(count, bytes, phase) and every counter that is cleared or recorded is broken at least once, alone;
so is every step of the K loops (one product, two, two halves), of the expander, which has a ring of
its own, and of dispatch where it unpacks; what a tile reads before its K loop and exchanges after
it, and what the order of tiles rests on. Each runs in the smallest scene in which it matters: calls
that follow each other on two ranks (a set of counters comes back in the third), a block whose rows
arrive one after another, an L2 tile in a program without an L1 tile of its block, a pool with more
blocks than its ring, for every K loop tiles with more stages than its ring holds. What changes no
bit of a call in such a scene, who gets which tile and how many values dispatch has rounded, is held
against oracles of its own (ORACLES). The unmutated copy passes every scene with the same seeds, so
a mutation is caught for what it breaks.
"""

from __future__ import annotations

import importlib
import itertools
import re
import shutil
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
import pytest
import torch
from exact_e4m3 import rebase_grid, rebased
from helpers import Layer, Routing, live_blocks, make_call, make_config, run_back_to_back, same_bits
from mutations import MUTATIONS, NOT_CAUGHT
from schedule_walk import WALKS, right_shares, walk

import megamoe.kernel
import megamoe.launch
import megamoe.plan
from megamoe.config import MoEConfig
from megamoe.interpreter import KernelError
from megamoe.symmetric import MegaMoEError

pytestmark = pytest.mark.slow

SEEDS = 100
UNMUTATED_SEEDS = 5
NUMBERS = itertools.count()


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


def one_row_less(config: MoEConfig, tokens: int, g: torch.Generator) -> torch.Tensor:
    """All rows but the last go to the first expert."""
    idx = torch.zeros(tokens, 1, dtype=torch.int64)
    idx[-1] = 1
    return idx


TWO_RANKS = {"ranks": 2, "experts": 6, "capacity": 5}
LONG = {"hidden": 512, "intermediate": 512}
STEPS = {"hidden": 1280}
ONE_RANK = {"experts": 20, "topk": 4, "capacity": 5, "block_m": 128}
HALVES = {"experts": 1, "topk": 1, "capacity": 129}  # more rows than plan.WIDE_ROWS
MANY = {"ranks": 2, "experts": 40, "topk": 1, "capacity": 40, "block_m": 128}
SCENES = {
    # a few blocks and tokens, fewer, more: what was not cleared is met again by the third call
    "calls": Scene(Layer(make_config(**TWO_RANKS)), 2, ((3, 2), (1, 0), (4, 3))),
    "prefill": Scene(Layer(make_config(("fp8", "token"), block_m=64, **TWO_RANKS)), 2, ((3, 2),)),
    "bf16": Scene(Layer(make_config(("bf16", "none"), **TWO_RANKS)), 2, ((3, 2),)),
    # several steps a tile: with one, the ring of tasks alone keeps the loaders from running too far
    "mxfp4": Scene(Layer(make_config(("mxfp4", "token"), **LONG, **TWO_RANKS)), 1, ((4, 4),)),
    "fp8_block": Scene(
        Layer(make_config(("fp8_block", "block128"), **LONG, **TWO_RANKS)), 1, ((4, 4),)
    ),
    "fp8_block wide": Scene(
        Layer(make_config(("fp8_block", "block128"), block_m=128, **LONG, **TWO_RANKS)),
        1,
        ((4, 4),),
    ),
    "fp8 long": Scene(Layer(make_config(("fp8", "token"), **LONG, **TWO_RANKS)), 1, ((4, 4),)),
    "mxfp4 wide": Scene(
        Layer(make_config(("mxfp4", "token"), block_m=128, **LONG, **TWO_RANKS)), 1, ((4, 4),)
    ),
    # 256 weight rows a stage; both partitions have tokens of the first block, one of the second
    # (and with this seed L2's weight scales of the one half are not those of the other)
    "fp8 halves": Scene(Layer(make_config(("fp8", "token"), **HALVES), seed=61), 1, ((129,),)),
    "bf16 halves": Scene(Layer(make_config(("bf16", "none"), **HALVES)), 1, ((129,),)),
    # programs that have L2 tiles of a block and none of its L1 tiles
    "spread": Scene(Layer(make_config(**TWO_RANKS)), 4, ((3, 2),)),
    # every program has tokens of its own, more than are added up at once
    "long": Scene(
        Layer(make_config(("fp8", "token"), **(TWO_RANKS | {"capacity": 9}))), 1, ((8, 5),) * 3
    ),
    # a second partition without tokens, and with one; rings longer than a tile
    "fp8 wide": Scene(
        Layer(make_config(("fp8", "token"), block_m=128, **LONG, **TWO_RANKS)), 1, ((4, 4),)
    ),
    "half": Scene(
        Layer(make_config(("fp8", "token"), experts=2, topk=1, capacity=65, block_m=128)),
        4,  # each with one tile of L1
        ((65,),),
        "one_expert",
    ),
    "crowded": Scene(Layer(make_config(("bf16", "none"), **TWO_RANKS)), 2, ((5, 4),), uneven),
    # rows of five steps, rebased and as they are
    "steps": Scene(Layer(make_config(("fp8", "ue8m0_32"), **STEPS, **TWO_RANKS)), 2, ((3, 2),)),
    "steps wide": Scene(
        Layer(make_config(("fp8", "ue8m0_32"), block_m=128, **STEPS, **TWO_RANKS)), 2, ((3, 2),)
    ),
    "steps of bytes": Scene(
        Layer(make_config(("fp8", "token"), **STEPS, **TWO_RANKS)), 2, ((3, 2),)
    ),
    # most programs pull no row of the second expert; a call between two that unpack
    "unpacked": Scene(
        Layer(make_config(("mxfp4", "token"), experts=2, topk=1, capacity=260)),
        3,
        ((260,), (5,), (257,)),
        one_row_less,
    ),
    # the first tokens are complete before the last rows are pulled
    "two rings": Scene(Layer(make_config(("fp8", "token"), **MANY)), 1, ((40, 40),)),
    "ring": Scene(Layer(make_config(("fp8", "token"), **ONE_RANK)), 1, ((5,),)),
}


@pytest.fixture(autouse=True)
def unpacks_early(monkeypatch):
    """A call of a few blocks unpacks MXFP4."""
    monkeypatch.setattr(megamoe.plan, "UNPACK_ROWS", 128)


@lru_cache
def expected(name: str) -> list[list[torch.Tensor]]:
    if name in ORACLES:
        return []
    scene = SCENES[name]
    return [scene.layer.model()(**call.arguments) for call in scene.calls]


LOOPS = (
    "bf16",
    "bf16 halves",
    "fp8 halves",
    "fp8 long",
    "fp8 wide",
    "fp8_block",
    "fp8_block wide",
    "mxfp4",
    "mxfp4 wide",
)


@pytest.mark.parametrize("name", LOOPS)
def test_scenes_of_k_loops_have_more_stages_than_their_rings(name):
    scene = SCENES[name]
    plan = scene.layer.model(programs=scene.programs).plan
    spec = plan.spec(plan.policy(max(scene.tokens[0])))
    assert spec.halves == (2 if "halves" in name else 1)
    blocks = live_blocks(scene.calls[0], scene.layer.config, 0, spec.block_m)
    steps = blocks * (spec.l1_tiles * spec.l1_steps + spec.l2_tiles * spec.l2_steps)
    assert steps // scene.programs > spec.packed_stages * spec.packed_k // spec.block_k


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


def walk_outcome(mega) -> str:
    role = importlib.import_module(f"{mega.__package__}.schedule").schedule_role
    return "" if all(walk(role, case) == right_shares(case) for case in WALKS) else "wrong shares"


def rebase_outcome(mega) -> str:
    words, shifts, right, changed = rebase_grid()
    found = rebased(importlib.import_module(f"{mega.__package__}.dispatch").rebase, words, shifts)
    if not np.array_equal(found[0], right):
        return "wrong codes"
    return "" if np.array_equal(found[1], changed) else "wrong counts"


ORACLES = {"walk": walk_outcome, "rebase": rebase_outcome}


def outcome(name: str, seed: int) -> str:
    """How the calls of a scene ended: "" if right, else the class of the error or what is wrong."""
    if name in ORACLES:
        try:
            return ORACLES[name](megamoe.launch.mega)
        except KernelError as error:
            return type(error).__name__
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
    for seed in range(1 if mutation.scene in ORACLES else SEEDS):
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
    seeds = range(1 if mutation.scene in ORACLES else 3)
    assert {outcome(mutation.scene, seed) for seed in seeds} == {""}, f"no longer: {why}"


@pytest.mark.parametrize("name", [*SCENES, *ORACLES])
def test_unmutated_copy_passes(name, tmp_path, monkeypatch):
    expected(name)
    monkeypatch.setattr(megamoe.launch, "mega", build((), tmp_path, monkeypatch))
    seeds = range(1 if name in ORACLES else UNMUTATED_SEEDS)
    assert {outcome(name, seed) for seed in seeds} == {""}
