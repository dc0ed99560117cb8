"""The simulated machine: ranks, buffers, launches, and the scheduler of their tasks.

Every (rank, program, partition) is a greenlet.  A seeded scheduler picks who goes on at each wait,
atomic, flag access and asynchronous completion; the same seed gives the same run.
"""

from __future__ import annotations

import inspect
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from greenlet import GreenletExit, getcurrent, greenlet

from . import dtypes as dt
from .cost import CostTable
from .errors import AsyncFault, BarrierFault, Deadlock, KernelError, Livelock
from .faults import locate, party
from .hopper import Descriptor
from .memory import Allocation, Memory, as_bytes
from .order import SLOTS, UNWRITTEN, Clock, Knowledge, Order, join
from .rebind import rebind, to_interpreter
from .values import Pointer, Scalar, wrap

_TIME_JUMP_NS = 60_000_000_000


class Buffer:
    """A registered array: `address` in the simulated memory, `rank`, and `nbytes`."""

    def __init__(self, alloc: Allocation, array: object):
        self.alloc, self.array = alloc, array

    @property
    def address(self) -> int:
        return self.alloc.base

    @property
    def rank(self) -> int:
        return self.alloc.rank

    @property
    def nbytes(self) -> int:
        return self.alloc.size


class Program:
    """One CTA: its barriers, clock slots, and TMA loads under way; until when (simulated ns) its
    TMA unit and its tensor cores are busy.
    """

    def __init__(self) -> None:
        self.tma_ns = self.mma_ns = 0.0
        self.barriers: list = []
        self.slots: list[int] = []
        self.copies = 0


@dataclass
class Launch:
    """One kernel launch of one rank."""

    rank: int
    name: str
    fn: Callable
    grid: int
    args: tuple
    kwargs: dict
    num_warps: int
    running: int = 0
    end: Knowledge | None = field(default=None)


class Task(greenlet):
    """One partition of one program."""

    def __init__(
        self,
        machine: Machine,
        launch: Launch,
        program: int,
        cta: Program,
        role: str,
        warps: int,
        clock: Callable[[Task], Clock],
        body: Callable,
    ):
        super().__init__(self._main, parent=machine.hub)
        self.machine, self.launch, self.program, self.cta = machine, launch, program, cta
        self.rank, self.role, self.warps, self.body = launch.rank, role, warps, body
        self.waiting: Callable[[], str] | None = None  # says what for
        self.watching: list[tuple[Allocation, int]] = []
        self.polls: dict[tuple, tuple] = {}  # flags read since the last effect: value, address
        self.soft = False  # waits only because it read the same value twice
        self.timed = False  # its wait ends when the time is up
        self.mmas: list = []
        self.stores: list = []
        self.loose: dict[str, Knowledge | None] = {
            "gpu": None,
            "sys": None,
        }  # read relaxed, not yet fenced
        self.fence_release: dict[str, Knowledge | None] = {"gpu": None, "sys": None, "cta": None}
        self.clock = clock(self)
        cta.slots.append(self.clock.slot)
        self.finished = False
        self.joining: Sequence[Task] = ()

    @property
    def title(self) -> str:
        return f"rank {self.rank}, program {self.program}, {self.role}"

    def _main(self) -> None:
        try:
            with np.errstate(all="ignore"):
                self.body(self)
        except GreenletExit:
            raise
        except KernelError as e:
            raise locate(e, self) from e.__cause__
        except Exception as e:
            raise locate(KernelError(f"{type(e).__name__}: {e}"), self, e.__traceback__) from e

    def pause(self) -> None:
        """Let the scheduler choose who goes on."""
        m = self.machine
        m.ready.append(self)
        m.switch(self)

    def block(self, what: Callable[[], str]) -> None:
        """Wait until somebody calls `wake`."""
        self.waiting = what
        self.machine.switch(self)

    def wake(self) -> None:
        if self.waiting is not None:
            self.waiting = None
            for alloc, offset in self.watching:
                watchers = alloc.watchers.get(offset)
                if watchers is not None and self in watchers:
                    watchers.remove(self)
                    if not watchers:
                        del alloc.watchers[offset]
            self.watching.clear()
            self.soft = self.timed = False
            self.machine.ready.append(self)

    def watch(self, places: Sequence[tuple[Allocation, int]], what: Callable[[], str]) -> None:
        """Wait until one of these (allocation, offset) is written."""
        for alloc, offset in dict.fromkeys(places):
            alloc.watchers.setdefault(offset, []).append(self)
            self.watching.append((alloc, offset))
        self.block(what)

    def effect(self) -> None:
        """The task did something that others may see: what it polls may change because of it."""
        self.machine.effects += 1
        if self.polls:
            self.polls.clear()


class Machine:
    """A node of `ranks` simulated GPUs.

    `seed` picks the schedule.  `expire_deadlines`: when nothing can run, time jumps so that loops
    that read the timer run into their deadline (otherwise that state is a `Deadlock`).  `max_steps`
    bounds a run; `progress(steps)` is called every 10,000 steps.
    """

    def __init__(
        self,
        *,
        ranks: int = 1,
        seed: int = 0,
        deadline_ns: int | None = None,
        expire_deadlines: bool = False,
        max_steps: int = 50_000_000,
        progress: Callable[[int], None] | None = None,
    ):
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; at least one is needed")
        self.ranks, self.seed = ranks, seed
        self.rng = random.Random(seed)
        self.memory, self.order = Memory(), Order()
        self.expire_deadlines, self.deadline_ns = expire_deadlines, deadline_ns
        self.max_steps, self.progress = max_steps, progress
        self.time_ns = 1_000_000_000
        # set it to simulate time: then the task furthest behind runs next, whatever the seed
        self.cost: CostTable | None = None
        self.launches: list[tuple[int, str]] = []
        self.steps = 0
        self.events = {"tma_loads": 0, "tma_stores": 0, "mmas": 0, "atomics": 0}
        self.hub: greenlet | None = None
        self.ready: list[Task] = []
        self.pending: list = []
        self.tasks: dict[Task, None] = {}
        self._queues: list[deque[Launch]] = [deque() for _ in range(ranks)]
        self._slots: dict[tuple[int, int, int], int] = {}
        self._after: list[Knowledge | None] = [None] * ranks
        self.effects = 0  # changes that others may see
        self._idle_wakes = self._idle_effects = 0

    def timer(self, task: Task) -> int:
        """What %globaltimer reads: the task's simulated time, or a nanosecond a scheduler step, so
        that traces show the order.
        """
        return self.time_ns + (self.steps if self.cost is None else int(task.clock.ns))

    # --- buffers and arguments --------------------------------------------------------------------

    def register(
        self,
        rank: int,
        array: object,
        *,
        name: str = "buffer",
        written: bool = True,
        readonly: bool = False,
    ) -> Buffer:
        """Give `array` (contiguous NumPy array or CPU tensor, not copied) an address on `rank`.

        `written=False`: reading bytes that no kernel has written is an error.  `readonly`: kernels
        may not write it, which saves the bookkeeping of who read what.
        """
        if not 0 <= rank < self.ranks:
            raise ValueError(f"rank {rank} is not one of 0 to {self.ranks - 1}")
        return Buffer(self.memory.add(as_bytes(array), rank, name, written, readonly), array)

    def label(self, buf: Buffer, offset: int, nbytes: int, name: str, itemsize: int = 1) -> None:
        """Name a region: messages then say `name[index] of rank r`."""
        self._check_range(buf, offset, nbytes)
        buf.alloc.labels.append((offset, offset + nbytes, name, itemsize))
        buf.alloc.cut(offset)
        buf.alloc.cut(offset + nbytes)

    def mark_unwritten(self, buf: Buffer, offset: int, nbytes: int) -> None:
        """Reading these bytes is an error until a kernel, or `mark_written`, has written them."""
        self._check_range(buf, offset, nbytes)
        buf.alloc.mark(offset, nbytes, UNWRITTEN)

    def mark_written(self, buf: Buffer, offset: int, nbytes: int) -> None:
        self._check_range(buf, offset, nbytes)
        buf.alloc.mark(offset, nbytes, 0)

    def _check_range(self, buf: Buffer, offset: int, nbytes: int) -> None:
        if offset < 0 or nbytes < 1 or offset + nbytes > buf.nbytes:
            raise ValueError(
                f"bytes {offset} to {offset + nbytes - 1} are not inside {buf.alloc.name}, "
                f"which has {buf.nbytes} bytes"
            )

    def pointer(self, buf: Buffer | int, dtype: object = "int8", offset: int = 0) -> Pointer:
        """A pointer argument: `offset` bytes into a buffer, or from a plain address."""
        base = buf if isinstance(buf, int) else buf.address
        return Pointer(base + offset, [], (), dt.pointer_type(dt.as_dtype(dtype)))

    def descriptor(
        self,
        buf: Buffer | int,
        offset: int = 0,
        *,
        shape: Sequence[int],
        dtype: object,
        block_shape: Sequence[int],
        stride: int | Sequence[int] | None = None,
    ) -> Descriptor:
        """A TMA descriptor argument of a row-major array; `stride` is in elements (of the first
        dimension, or all).
        """
        base = buf if isinstance(buf, int) else buf.address
        return Descriptor(base + offset, list(shape), dt.as_dtype(dtype), list(block_shape), stride)

    # --- launches ---------------------------------------------------------------------------------

    def enqueue(
        self,
        rank: int,
        kernel: object,
        *,
        grid: int,
        args: Sequence = (),
        kwargs: dict | None = None,
        num_warps: int = 4,
    ) -> None:
        """Put a launch of `grid` programs at the end of the stream of `rank`.

        Integers become int32 (int64 if they need it), floats fp32; parameters annotated
        `gl.constexpr`, and `kwargs` for them, stay Python values.
        """
        fn = rebind(kernel)
        bound = inspect.signature(fn).bind(*args, **(kwargs or {}))
        bound.apply_defaults()
        for name, parameter in bound.signature.parameters.items():
            value = to_interpreter(bound.arguments[name])
            if "constexpr" not in str(parameter.annotation):
                value = _argument(value)
            bound.arguments[name] = value
        name = getattr(kernel, "__name__", fn.__name__)
        self._queues[rank].append(Launch(rank, name, fn, grid, bound.args, bound.kwargs, num_warps))

    def _start(self, launch: Launch) -> None:
        self.launches.append((launch.rank, launch.name))
        launch.running = launch.grid
        start = self._after[launch.rank]
        for program in range(launch.grid):
            slot = self.slot(launch.rank, program, 0)
            cta = Program()
            task = Task(
                self,
                launch,
                program,
                cta,
                launch.name,
                launch.num_warps,
                lambda t, s=slot: Clock(self.order, s, start, t),
                _run_program,
            )
            self.tasks[task] = None
            self.ready.append(task)

    def slot(self, rank: int, program: int, partition: int) -> int:
        """Clock slots of a task; launches of a rank reuse them, since they run in turn."""
        key = (rank, program, partition)
        if key not in self._slots:
            self._slots[key] = self.order.add_slots(SLOTS)
        return self._slots[key]

    def finished(self, task: Task) -> None:
        """A whole program has ended."""
        launch = task.launch
        for slot in task.cta.slots:
            task.clock.finish(slot)
        launch.end = join(launch.end, task.clock.snapshot())
        launch.running -= 1
        if launch.running == 0:
            self._after[launch.rank] = launch.end
            self._next_launch(launch.rank)

    def _next_launch(self, rank: int) -> None:
        if self._queues[rank]:
            self._start(self._queues[rank].popleft())

    # --- the scheduler ----------------------------------------------------------------------------

    def run(self) -> None:
        """Run all enqueued launches to their end; raises a `KernelError` at the first fault."""
        self.hub = getcurrent()
        try:
            for rank in range(self.ranks):
                self._next_launch(rank)
            while self.tasks:
                task = self._pick()
                if task is None:
                    self._idle()
                else:
                    task.switch()
            while self.pending:
                self.pending.pop().land()
        except BaseException:
            self._abandon()
            raise
        finally:
            self.hub = None
        self._host_boundary()

    def switch(self, me: Task) -> None:
        """Go on with whoever is picked next; returns when `me` is picked again."""
        task = self._pick()
        if task is me:
            return
        (self.hub if task is None else task).switch()

    def _pick(self) -> Task | None:
        """The next task to run; completes asynchronous copies that are picked before it."""
        ready, pending = self.ready, self.pending
        while True:
            n = len(ready)
            total = n + len(pending)
            if not total:
                return None
            self.steps += 1
            if self.steps % 10_000 == 0:
                self._check_steps()
            k = int(self.rng.random() * total) if self.cost is None else self._furthest_behind()
            if k < n:
                task = ready[k]
                last = ready.pop()
                if k < n - 1:
                    ready[k] = last
                return task
            op = pending.pop(k - n)
            op.land()

    def _furthest_behind(self) -> int:
        """Place among the tasks that can run, then the copies under way, of the earliest time."""
        times = [task.clock.ns for task in self.ready]
        times += [operation.ns for operation in self.pending]
        return times.index(min(times))

    def _check_steps(self) -> None:
        if self.progress is not None:
            self.progress(self.steps)
        if self.steps >= self.max_steps:
            raise Livelock(f"no end after {self.steps} steps; the tasks:\n" + self._report())

    def _idle(self) -> None:
        """Nobody can run.  Let the polls that only wait because nothing changed try again, then let
        time pass.
        """
        tasks = list(self.tasks)
        soft = [t for t in tasks if t.soft]
        timed = [t for t in tasks if t.timed]
        # a wait of several lanes looks at its deadline lane by lane, every 32 polls
        limit = (8192 if self.expire_deadlines else 64) + 2 * len(tasks)
        if self._idle_effects != self.effects:
            self._idle_effects, self._idle_wakes = self.effects, 0
        self._idle_wakes += 1
        if self._idle_wakes <= limit and (soft or timed and self.expire_deadlines):
            if self.expire_deadlines:
                self.time_ns += self.deadline_ns or _TIME_JUMP_NS
                soft += timed
            for task in soft:
                task.wake()
            return
        raise Deadlock("every task waits and nothing is under way:\n" + self._report())

    def _report(self) -> str:
        lines = []
        for task in self.tasks:
            what = task.waiting() if task.waiting is not None else "can run"
            lines.append(f"  {task.title}: {what}")
        return "\n".join(lines)

    def _abandon(self) -> None:
        for task in list(self.tasks):
            if not task.dead:
                task.throw(GreenletExit)
        self.tasks.clear()
        self.ready.clear()
        self.pending.clear()
        for queue in self._queues:
            queue.clear()
        self._host_boundary()

    def _host_boundary(self) -> None:
        """All that happened is before all that will: forget the history."""
        self.order.last.clear()
        self.order.reset()
        self._slots.clear()
        self._after = [None] * self.ranks
        for alloc in self.memory.allocations:
            alloc.flags.clear()
            alloc.watchers.clear()
            if not alloc.readonly:
                for shadow in alloc.shadows:
                    np.minimum(shadow.write, 0, out=shadow.write)
                    shadow.read.fill(0)


def _argument(value: object) -> object:
    """A kernel argument as the kernel sees it."""
    if isinstance(value, bool):
        return Scalar(value, dt.int1)
    if isinstance(value, (int, np.integer)):
        value = int(value)
        return Scalar(value, dt.int32 if -(1 << 31) <= value < 1 << 31 else dt.int64)
    if isinstance(value, (float, np.floating)):
        return wrap(value, dt.float32)
    if isinstance(value, Buffer):
        raise KernelError(
            "pass m.pointer(buffer, dtype=...) or m.descriptor(...), not the buffer itself"
        )
    if hasattr(value, "data_ptr") or isinstance(value, np.ndarray):
        raise KernelError("arrays are passed as m.pointer(m.register(rank, array), dtype=...)")
    return value


def _run_program(task: Task) -> None:
    launch = task.launch
    launch.fn(*launch.args, **launch.kwargs)
    task.role = launch.name
    end_task(task)
    cta = task.cta
    if cta.copies:
        raise AsyncFault(
            f"the program ends with {cta.copies} TMA loads under way that nobody waited for"
        )
    for barrier in cta.barriers:
        if barrier.valid and barrier.tx:
            raise BarrierFault(
                f"the program ends while {barrier.name} still expects {barrier.tx} bytes"
            )
    machine = task.machine
    del machine.tasks[task]
    machine.finished(task)


def end_task(task: Task) -> None:
    """Checks at the end of a partition."""
    order = task.machine.order
    if task.mmas:
        raise AsyncFault(
            f"the partition ends with {len(task.mmas)} warpgroup_mma not waited for "
            f"(the first: {party(order.info[task.mmas[0].event])})"
        )
    if task.stores:
        raise AsyncFault(
            f"the partition ends with {len(task.stores)} TMA stores not waited for "
            f"(the first: {party(order.info[task.stores[0][1]])})"
        )
