"""The race detector against a plain one, on random programs.

Four programs on two ranks run random tables of byte, word and vector accesses to 48 shared bytes
and of releases and acquires, so that accesses overlap partly, lie between each other, and are
ordered or not by chance.  A byte-by-byte vector-clock detector written here judges the order that
was run: both must stop at the same access, or at none.  The tables are drawn so that about half
of the runs have no race.
"""

import numpy as np
import pytest

from megamoe.interpreter import DataRace, Machine
from megamoe.kernel.compat import gl, gluon

BYTES, OPS, FLAGS = 48, 24, 6
STORE1, LOAD1, STORE4, LOAD4, STORE16, LOAD16, RELEASE, ACQUIRE, BOTH, RELAXED = range(10)
TRACE = []
note = TRACE.append


@gluon.jit
def random_kernel(data, words, flags, table, n, first):
    p = gl.program_id(0) + first
    lane = gl.arange(0, 16)
    for i in range(n):
        entry = table + (p * n + i) * 3
        code = gl.load(entry)
        at = gl.load(entry + 1)
        scope_all = gl.load(entry + 2) == 1
        if code < 6:
            note((p, code, at, 0))
        if code == 0:
            gl.store(data + at, i.to(gl.int8))
        if code == 1:
            gl.load(data + at)
        if code == 2:
            gl.store(words + at // 4, i)
        if code == 3:
            gl.load(words + at // 4)
        if code == 4:
            gl.store(data + at + lane, i.to(gl.int8))
        if code == 5:
            gl.load(data + at + lane)
        if code >= 6:
            if scope_all:
                update(flags + at, code, "sys")
            else:
                update(flags + at, code, "gpu")
            note((p, code, at, scope_all))


@gluon.jit
def update(flag, code, SCOPE: gl.constexpr):
    if code == 6:
        gl.atomic_add(flag, 1, sem="release", scope=SCOPE)
    if code == 7:
        gl.atomic_or(flag, 0, sem="acquire", scope=SCOPE)
    if code == 8:
        gl.atomic_add(flag, 1, sem="acq_rel", scope=SCOPE)
    if code == 9:
        gl.atomic_add(flag, 1, sem="relaxed", scope=SCOPE)


class PlainDetector:
    """Vector clocks, and per byte the clock of every program's last read and write."""

    def __init__(self, ranks):
        n = len(ranks)
        self.ranks = ranks
        self.clock = [[int(i == j) for j in range(n)] for i in range(n)]
        self.wrote = [[0] * n for _ in range(BYTES)]
        self.read = [[0] * n for _ in range(BYTES)]
        self.released = {}

    def races(self, p, code, at, scope_all):
        """Whether this access races with an earlier one; else it becomes part of the history."""
        mine = self.clock[p]
        if code >= RELEASE:
            self.synchronise(p, code, at, scope_all)
            return False
        size = {STORE1: 1, LOAD1: 1, STORE4: 4, LOAD4: 4}.get(code, 16)
        at = at // 4 * 4 if size == 4 else at
        writes = code in (STORE1, STORE4, STORE16)
        for byte in range(at, at + size):
            if any(c > m for c, m in zip(self.wrote[byte], mine, strict=True)):
                return True
            if writes and any(c > m for c, m in zip(self.read[byte], mine, strict=True)):
                return True
        for byte in range(at, at + size):
            (self.wrote if writes else self.read)[byte][p] = mine[p]
        return False

    def synchronise(self, p, code, flag, scope_all):
        if code in (ACQUIRE, BOTH):
            for rank, released in self.released.get(flag, []):
                if scope_all or rank == self.ranks[p]:
                    self.clock[p] = [
                        max(a, b) for a, b in zip(self.clock[p], released, strict=True)
                    ]
        if code in (RELEASE, BOTH):
            self.released.setdefault(flag, []).append((self.ranks[p], list(self.clock[p])))
            self.clock[p][p] += 1


def random_table(rng, ranks):
    """Few different bytes for a program, mostly its own, and many chances to synchronise."""
    table = np.zeros((len(ranks), OPS, 3), np.int32)
    for p in range(len(ranks)):
        for i in range(OPS):
            if rng.random() < 0.45:
                code = rng.choice([RELEASE, ACQUIRE, ACQUIRE, BOTH, RELAXED])
                if rng.random() < 0.7:
                    table[p, i] = code, rng.integers(0, 2), 1
                else:
                    table[p, i] = code, 2 + 2 * ranks[p] + rng.integers(0, 2), 0
            else:
                code = rng.choice([STORE1, LOAD1, LOAD1, STORE4, LOAD4, STORE16, LOAD16, LOAD16])
                own = rng.random() < 0.98
                at = 12 * p + rng.integers(0, 9) if own else rng.integers(0, BYTES)
                size = 16 if code in (STORE16, LOAD16) else 4 if code in (STORE4, LOAD4) else 1
                if size == 16 and rng.random() < 0.97:
                    code, size = LOAD1, 1
                table[p, i] = code, min(at, BYTES - size), 0
    return table


@pytest.mark.parametrize("block", range(10))
def test_detector_agrees_with_a_plain_one(block):
    ranks = [0, 0, 1, 1]
    found = 0
    for seed in range(20 * block, 20 * block + 20):
        rng = np.random.default_rng(seed)
        table = random_table(rng, ranks)
        m = Machine(ranks=2, seed=seed)
        data = m.register(0, np.zeros(BYTES, np.int8), name="data")
        flags = m.pointer(m.register(1, np.zeros(FLAGS, np.int32), name="flags"), "int32")
        names = m.pointer(m.register(0, table, name="table", readonly=True), "int32")
        TRACE.clear()
        for rank in range(2):
            args = [m.pointer(data, "int8"), m.pointer(data, "int32"), flags, names, OPS, 2 * rank]
            m.enqueue(rank, random_kernel, grid=2, args=args, num_warps=1)
        raced = False
        try:
            m.run()
        except DataRace:
            raced = True
        plain = PlainDetector(ranks)
        verdicts = [plain.races(*(int(x) for x in entry)) for entry in TRACE]
        assert not any(verdicts[:-1]), f"seed {seed}: missed {TRACE[verdicts.index(True)]}"
        assert verdicts[-1] == raced, f"seed {seed}: {TRACE[-1]}, found: {raced}"
        found += raced
    assert 0 < found < 20
