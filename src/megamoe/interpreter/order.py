"""Who is ordered after whom: vector clocks, events, and what an acquire learns from a release.

Every task owns slots of the clock vectors: its own accesses, and its asynchronous operations (which
are ordered after their issue but before the task only once it has waited).  A slot's clock moves on
when something is published.  An *event* is "accesses of one kind, from one line, in one tick of one
slot"; memory remembers the last writing event and the reading events of each granule, and an access
is a race unless the clock of its task covers them.

The proxy rule: bytes stored ordinarily and read by TMA need a proxy fence by the writer (before its
release) and one by the reader (after its acquire).  Shared memory needs only the writer's.
"""

from __future__ import annotations

import sys

import numpy as np

# Clock slots of a task: its own accesses, and the lanes of its asynchronous operations.
SLOTS = 4
COPIES, MMAS, STORE_READS = 1, 2, 3
GENERIC, ASYNC, ATOMIC_GPU, ATOMIC_SYS = range(4)
UNWRITTEN, IN_FLIGHT = -1, -2
_FEW = 128  # up to so many granules, plain Python is quicker than NumPy
KIND_NAMES = ("ordinary", "TMA", "atomic (gpu scope)", "atomic (sys scope)")


def same(ids: np.ndarray) -> int | None:
    """The one value of an int32 array, or None.  (Much quicker than two reductions.)"""
    raw = ids.tobytes()
    head = raw[:4]
    if raw == head * (len(raw) >> 2):
        return int.from_bytes(head, sys.byteorder, signed=True)
    return None


def _join(a: np.ndarray | None, b: np.ndarray | None) -> np.ndarray | None:
    """Elementwise maximum of two clock vectors, which may differ in length; None is all zero."""
    if a is None or b is None:
        return a if b is None else b
    if a is b:
        return a
    if a.size == b.size:
        return np.maximum(a, b)
    if a.size < b.size:
        a, b = b, a
    out = a.copy()
    np.maximum(out[: b.size], b, out=out[: b.size])
    return out


class Knowledge:
    """What a release hands over: clocks, the clocks that were proxy-fenced (global, shared), and
    the simulated time `ns`.  Immutable.
    """

    __slots__ = ("fenced", "ns", "sfenced", "vc")

    def __init__(
        self,
        vc: np.ndarray,
        fenced: np.ndarray | None,
        sfenced: np.ndarray | None,
        ns: float = 0.0,
    ):
        self.vc, self.fenced, self.sfenced, self.ns = vc, fenced, sfenced, ns

    def join(self, other: Knowledge | None) -> Knowledge:
        if other is None or other is self:
            return self
        return Knowledge(
            _join(self.vc, other.vc),
            _join(self.fenced, other.fenced),
            _join(self.sfenced, other.sfenced),
            max(self.ns, other.ns),
        )


def join(a: Knowledge | None, b: Knowledge | None) -> Knowledge | None:
    return b if a is None else a.join(b)


class Clock:
    """A task's view of everybody's progress; `ns` is its simulated time, 0 without a cost table."""

    __slots__ = (
        "events",
        "fenced",
        "ns",
        "order",
        "pending",
        "scattered",
        "seen",
        "sfenced",
        "slot",
        "sseen",
        "ordered",
        "task",
        "vc",
    )

    def __init__(
        self,
        order: Order,
        slot: int,
        start: Knowledge | None,
        task: object,
        parent: Clock | None = None,
    ):
        self.order, self.slot, self.task = order, slot, task
        self.vc = order.fresh(start.vc if start else None)
        if parent is None:
            # A launch boundary fences everything.
            self.seen = self.fenced = self.sseen = self.sfenced = self.vc.copy()
            self.pending = None
        else:
            self.fenced = self.sfenced = None
            self.seen, self.pending = parent.seen, _join(parent.pending, start.fenced)
            self.sseen = _join(parent.sseen, start.sfenced)
        self.vc[slot] = order.tick(slot)
        self.ns = start.ns if start else 0.0
        self.scattered = False  # accesses by all warps since the last barrier, which orders them
        self.ordered = int(self.vc[slot]) - 1
        self.events: dict[tuple, int] = {}

    def advance(self) -> None:
        self.vc[self.slot] = self.order.tick(self.slot)
        self.events.clear()

    def knows(self, event: int) -> bool:
        """Whether the event happened before now."""
        if event <= 0:
            return True
        order = self.order
        slot = order.slots[event]
        return slot < self.vc.size and bool(self.vc[slot] >= order.clks[event])

    def event(self, kind: int, where: tuple) -> int:
        """Number of the event for an access of `kind` from the line `where`, now."""
        key = (kind, where)
        event = self.events.get(key)
        if event is None:
            event = self.order.new_event(self.slot, int(self.vc[self.slot]), kind, self.task, where)
            self.events[key] = event
        return event

    def async_event(self, where: tuple, lane: int) -> int:
        """A new event for one asynchronous operation of a lane; learn it with `learn_async` after
        waiting.
        """
        slot = self.slot + lane
        return self.order.new_event(slot, self.order.tick(slot), ASYNC, self.task, where)

    def completion(self, event: int, ns: float = 0.0) -> Knowledge:
        """What the completion of that operation, at time `ns`, publishes: the operation itself."""
        vc = np.zeros(self.vc.size, np.int32)
        vc[self.order.slots[event]] = self.order.clks[event]
        return Knowledge(vc, None, None, ns)

    def learn_async(self, event: int) -> None:
        slot = self.order.slots[event]
        self.vc[slot] = max(self.vc[slot], self.order.clks[event])

    def finish(self, slot: int) -> None:
        """The task of these slots, and all its asynchronous operations, have ended before now."""
        if slot + SLOTS > self.vc.size:
            self.vc = self.order.fresh(self.vc)
        self.vc[slot : slot + SLOTS] = self.order.last[slot : slot + SLOTS]

    def snapshot(self, whole_partition: bool = True) -> Knowledge:
        """What a release hands over.  If one thread releases, accesses of the other warps count
        only up to the last barrier of the partition.
        """
        vc = self.vc.copy()
        if not whole_partition and self.scattered:
            vc[self.slot] = self.ordered
        return Knowledge(vc, self.fenced, self.sfenced, self.ns)

    def release(self, whole_partition: bool = True) -> Knowledge:
        out = self.snapshot(whole_partition)
        self.advance()
        return out

    def acquire(self, k: Knowledge | None) -> None:
        if k is None:
            return
        if k.ns > self.ns:
            self.ns = k.ns
        own = self.vc[self.slot]
        vc = _join(self.vc, k.vc)
        self.vc = vc.copy() if vc is k.vc or vc is self.vc else vc
        self.vc[self.slot] = own
        self.pending = _join(self.pending, k.fenced)
        self.sseen = _join(self.sseen, k.sfenced)

    def proxy_fence(self, in_global: bool, in_shared: bool) -> None:
        self.advance()
        snap = self.vc.copy()
        snap[self.slot] -= 1
        if in_global:
            self.fenced = snap
            self.seen = self._grown(_join(self.seen, self.pending))
            self.seen[self.slot] = snap[self.slot]
            self.pending = None
        if in_shared:
            self.sfenced = snap
            self.sseen = self._grown(self.sseen)
            self.sseen[self.slot] = snap[self.slot]

    def _grown(self, array: np.ndarray) -> np.ndarray:
        """A copy that has room for the own slot."""
        return array.copy() if array.size > self.slot else self.order.fresh(array)

    def barrier(self) -> None:
        """A CTA barrier of the partition: stores of all its warps are now before whatever one warp
        does next.
        """
        if self.scattered:
            self.scattered = False
            self.ordered = self.vc[self.slot]
            self.advance()


class Order:
    """The events of one run, and the sets of reading events that memory refers to by number."""

    def __init__(self) -> None:
        self.last: list[int] = []  # last clock handed out, per slot
        self.reset()

    def reset(self) -> None:
        """Forget all events: everything so far happened before everything to come."""
        self.slots, self.clks, self.kinds, self.info = [0], [0], [GENERIC], [None]
        self._np_slots, self._np_clks = np.zeros(256, np.int32), np.zeros(256, np.int32)
        self._np_kinds = np.zeros(256, np.int8)
        self._mirrored = 1
        self.states: list[tuple[int, ...]] = [()]
        self._state_ids: dict[tuple[int, ...], int] = {(): 0}
        self._next_state: dict[tuple[int, int], int] = {}

    def add_slots(self, count: int) -> int:
        """Reserve `count` slots; returns the first."""
        first = len(self.last)
        self.last += [0] * count
        return first

    def tick(self, slot: int) -> int:
        self.last[slot] += 1
        return self.last[slot]

    def fresh(self, start: np.ndarray | None) -> np.ndarray:
        """A clock vector of the present size that begins as `start`."""
        vc = np.zeros(len(self.last), np.int32)
        if start is not None:
            vc[: start.size] = start
        return vc

    def new_event(self, slot: int, clk: int, kind: int, task: object, where: tuple) -> int:
        self.slots.append(slot)
        self.clks.append(clk)
        self.kinds.append(kind)
        self.info.append((task, where))
        return len(self.slots) - 1

    def _mirror(self) -> None:
        """Bring the NumPy copies of the event table up to date."""
        n, old = len(self.slots), self._mirrored
        if n == old:
            return
        if n > self._np_slots.size:
            size = max(n, 2 * self._np_slots.size)
            for name in ("_np_slots", "_np_clks", "_np_kinds"):
                array = getattr(self, name)
                bigger = np.zeros(size, array.dtype)
                bigger[:old] = array[:old]
                setattr(self, name, bigger)
        self._np_slots[old:n] = self.slots[old:]
        self._np_clks[old:n] = self.clks[old:]
        self._np_kinds[old:n] = self.kinds[old:]
        self._mirrored = n

    def kind_name(self, event: int) -> str:
        """How an event accessed memory, for messages."""
        kind = self.kinds[event]
        if kind == ASYNC and self.slots[event] % SLOTS == MMAS:
            return "WGMMA"
        return KIND_NAMES[kind]

    # --- checks on arrays of event numbers --------------------------------------------------------

    def unordered(self, ids: np.ndarray, clock: Clock, atomic: int = -1) -> int:
        """An event among `ids` that did not happen before `clock`, or 0.  `atomic`: kind of the
        access if atomic.
        """
        event = same(ids)
        if event is not None:
            return 0 if clock.knows(event) or self.compatible(event, atomic, clock) else event
        if ids.size <= _FEW:
            late = [e for e in set(ids.ravel().tolist()) if not clock.knows(e)]
            return min((e for e in late if not self.compatible(e, atomic, clock)), default=0)
        if int(np.maximum.reduce(ids, axis=None)) <= 0:
            return 0
        self._mirror()
        flat = ids.ravel()
        slots = self._np_slots[flat]
        vc = clock.vc
        if vc.size < len(self.last):
            vc = clock.vc = self.fresh(vc)
        late = (vc[slots] < self._np_clks[flat]) & (flat > 0)
        if not late.any():
            return 0
        for event in np.unique(flat[late]):
            if not self.compatible(int(event), atomic, clock):
                return int(event)
        return 0

    def compatible(self, event: int, atomic: int, clock: Clock) -> bool:
        """Two atomics do not race if both scopes reach the other."""
        if atomic < ATOMIC_GPU or self.kinds[event] < ATOMIC_GPU:
            return False
        if self.kinds[event] == atomic == ATOMIC_SYS:
            return True
        return self.info[event][0].rank == clock.task.rank

    def unfenced(self, ids: np.ndarray, clock: Clock, shared: bool) -> int:
        """A generic write among `ids` that the async proxy may not see yet, or 0."""
        covered = clock.sseen if shared else clock.seen
        one = same(ids)
        late = 0
        for event in set(ids.ravel().tolist()) if one is None else (one,):
            if event > 0 and self.kinds[event] != ASYNC:
                slot = self.slots[event]
                if slot >= covered.size or covered[slot] < self.clks[event]:
                    late = event if not late else min(late, event)
        return late

    # --- sets of readers --------------------------------------------------------------------------

    def after_read(self, state: int, event: int, clock: Clock) -> int:
        """Number of the reader set `state` after one more reading `event`."""
        key = (state, event)
        new = self._next_state.get(key)
        if new is None:
            keep = [e for e in self.states[state] if not self._replaces(event, e, clock)]
            events = tuple(sorted([*keep, event]))
            new = self._state_ids.get(events)
            if new is None:
                new = self._state_ids[events] = len(self.states)
                self.states.append(events)
            self._next_state[key] = new
        return new

    def _replaces(self, new: int, old: int, clock: Clock) -> bool:
        """Whether whoever comes after the reading event `new` also comes after `old`."""
        if self.kinds[new] >= ATOMIC_GPU > self.kinds[old]:
            return False  # atomics look only at ordinary readers
        return clock.knows(old) or self.slots[old] == self.slots[new]

    def after_reads(self, states: np.ndarray, event: int, clock: Clock) -> object:
        """`after_read` of every element; one number if it is the same for all."""
        state = same(states)
        if state is not None:
            return self.after_read(state, event, clock)
        if states.size <= _FEW:
            new = [self.after_read(s, event, clock) for s in states.ravel().tolist()]
            return np.array(new, np.int32).reshape(states.shape)
        old, inverse = np.unique(states, return_inverse=True)
        new = np.array([self.after_read(int(s), event, clock) for s in old], np.int32)
        return new[inverse].reshape(states.shape)

    def unordered_reader(self, states: np.ndarray, clock: Clock, atomic: int = -1) -> int:
        """A reading event in one of the sets that did not happen before `clock`, or 0."""
        state = same(states)
        if state is not None:
            return self.late_reader(state, clock, atomic) if state else 0
        for state in np.unique(states):
            event = self.late_reader(int(state), clock, atomic)
            if event:
                return event
        return 0

    def late_reader(self, state: int, clock: Clock, atomic: int) -> int:
        for event in self.states[state]:
            if not clock.knows(event) and not self.compatible(event, atomic, clock):
                return event
        return 0


class Flag:
    """What acquires of one address learn: releases since the last plain or replacing store."""

    __slots__ = ("by_program", "by_rank", "system")

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        self.by_program: dict[tuple[int, int], Knowledge] = {}
        self.by_rank: dict[int, Knowledge] = {}
        self.system: Knowledge | None = None

    def publish(self, task: object, scope: str, k: Knowledge) -> None:
        if scope == "cta":
            key = (task.rank, task.program)
            self.by_program[key] = k.join(self.by_program.get(key))
            return
        self.by_rank[task.rank] = k.join(self.by_rank.get(task.rank))
        if scope == "sys":
            self.system = k.join(self.system)

    def learn(self, task: object, scope: str) -> Knowledge | None:
        """What an acquire of that scope by `task` learns."""
        out = self.by_program.get((task.rank, task.program))
        if scope != "cta":
            out = join(out, self.by_rank.get(task.rank))
        if scope == "sys":
            out = join(out, self.system)
        return out
