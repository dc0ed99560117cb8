"""The order of tiles from its description, and the schedule role's own, taken without a machine."""

from __future__ import annotations

from types import FunctionType, SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest

from megamoe.interpreter import language
from megamoe.interpreter.dtypes import int32
from megamoe.interpreter.rebind import rebind
from megamoe.interpreter.values import Scalar, Tensor
from megamoe.kernel.schedule import DONE, LINEAR1, LINEAR2, REHEARSAL

Tile = tuple[int, int, int]  # layer, block, tile of the block
Task = tuple[int, int, int, int, int]  # kind, block, tile, local expert, valid rows
KINDS = {1: LINEAR1.value, 2: LINEAR2.value}
BLOCK_M = 4  # the schedule is the same for any
LANES = 32


class Walk(NamedTuple):
    """What the schedule depends on: rows of each local expert, tiles of a block in L1 and L2."""

    rows: list[int]
    lag: int
    c1: int
    c2: int
    programs: int


# none, one row, full blocks, a row over, gaps: 0, 1, 2, 7 and 21 blocks
ROWS = ([0], [1], [0, 5], [4, 0, 3, 9, 4, 1], [17, 0, 0, 31, 4, 2, 24])
WALKS = [
    Walk(rows, lag, c1, c2, programs)
    for rows in ROWS
    for lag in (1, 2, 3, 9, 40)
    for c1, c2 in ((1, 1), (2, 1), (1, 3), (2, 4), (8, 3))
    for programs in (1, 2, 3, 5, 16)
]


def order(blocks: int, lag: int, c1: int, c2: int) -> list[Tile]:
    """(layer, block, tile) in order, from the description: L1 runs `lag` blocks ahead of L2."""
    first = min(lag, blocks)
    steps = [(1, b) for b in range(first)]
    for b in range(blocks):
        if first + b < blocks:
            steps.append((1, first + b))
        steps.append((2, b))
    return [(layer, b, t) for layer, b in steps for t in range(c1 if layer == 1 else c2)]


def dealt(tiles: list[Tile], programs: int) -> list[list[Tile]]:
    """Shares from the description: L1 tiles in turn, L2 tiles in turn from the program after the
    one with the last L1 tile, each share in the order of all tiles.
    """
    shares: list[list[Tile]] = [[] for _ in range(programs)]
    seen = {1: 0, 2: sum(layer == 1 for layer, _, _ in tiles)}
    for tile in tiles:
        shares[seen[tile[0]] % programs].append(tile)
        seen[tile[0]] += 1
    return shares


def blocks_of(rows: list[int]) -> list[tuple[int, int]]:
    """(expert, valid rows) of each pool block."""
    return [
        (expert, min(BLOCK_M, count - start))
        for expert, count in enumerate(rows)
        for start in range(0, count, BLOCK_M)
    ]


def right_shares(case: Walk, phases: str = "fused") -> list[list[Task]]:
    layers = {"fused": (1, 2), "linear1": (1,), "linear2": (2,)}[phases]
    owners = blocks_of(case.rows)
    tiles = [t for t in order(len(owners), case.lag, case.c1, case.c2) if t[0] in layers]
    return [
        [(KINDS[layer], b, t, *owners[b]) for layer, b, t in share]
        for share in dealt(tiles, case.programs)
    ]


def walk(role: object, case: Walk, phases: str = "fused") -> list[list[Task]]:
    """The tasks of each program as `role`, the kernel's schedule_role, writes them."""
    rows = np.zeros(LANES, np.int32)
    rows[: len(case.rows)] = case.rows
    tasks: list[tuple[int, ...]] = []
    stand_ins = {
        "rows_of_experts": lambda ctx, layout: Tensor(rows, int32),
        "put_task": lambda rings, i, *task: tasks.append((int(i), *map(int, task))),
    }
    fn = rebind(role)
    assert set(stand_ins) <= set(fn.__globals__)
    fn = FunctionType(fn.__code__, fn.__globals__ | stand_ins)
    spec = SimpleNamespace(
        block_m=BLOCK_M, expert_lanes=LANES, lag=case.lag, l1_tiles=case.c1, l2_tiles=case.c2,
        phases=phases, rehearses=phases == "fused",
    )  # fmt: skip
    shares = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(language, "num_programs", lambda axis: Scalar(case.programs, int32))
        patch.setattr(language, "num_warps", lambda: 1)
        for program in range(case.programs):
            patch.setattr(language, "program_id", lambda axis, p=program: Scalar(p, int32))
            tasks.clear()
            fn(SimpleNamespace(spec=spec), None)
            assert [i for i, *_ in tasks] == list(range(len(tasks)))
            assert tasks.pop()[1:] == (DONE.value, 0, 0, 0, 0)
            if phases == "fused":
                assert tasks.pop(0)[1:] == (REHEARSAL.value, 0, 0, 0, 0)
            shares.append([task[1:] for task in tasks])
    return shares
