"""Partitions of a program."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from greenlet import getcurrent

from .errors import KernelError
from .order import Clock
from .values import as_tensor


def _name(fn: Callable) -> str:
    return getattr(fn, "__name__", "partition")


def warp_specialize(
    functions_and_args: Sequence,
    worker_num_warps: Sequence[int],
    worker_num_regs: Sequence[int] | None = None,
) -> object:
    """Run the first partition in this task and the others in tasks of their own; returns the first
    one's result.
    """
    me = getcurrent()
    machine = me.machine
    workers = list(functions_and_args[1:])
    warps = [int(as_tensor(w).v) for w in worker_num_warps]
    if (
        len(warps) != len(workers)
        or worker_num_regs is not None
        and len(worker_num_regs) != len(workers)
    ):
        raise KernelError(
            f"warp_specialize: {len(workers)} worker partitions, {len(warps)} warp counts and "
            f"{len(worker_num_regs or [])} register counts"
        )
    if any(w not in (1, 2, 4, 8, 16) for w in warps):
        raise KernelError(
            f"warp_specialize: warp counts {warps}; each must be a power of two up to 16"
        )
    for _, args in workers:
        if any(isinstance(getattr(a, "v", None), np.ndarray) for a in args):
            raise KernelError(
                "warp_specialize: workers take scalars, pointers and shared memory, no tensors"
            )
    start = me.clock.release()
    names = [_name(fn) for fn, _ in functions_and_args]
    titles = [
        n if names.count(n) == 1 else f"{n}#{names[:i].count(n)}" for i, n in enumerate(names)
    ]
    kids = []
    for i, ((fn, args), count) in enumerate(zip(workers, warps, strict=True), start=1):
        kids.append(_spawn(me, i, titles[i], count, fn, args, start))
    role, me.role = me.role, titles[0]
    fn, args = functions_and_args[0]
    result = fn(*args)
    while not all(k.finished for k in kids):
        me.joining = kids
        me.block(
            lambda: (
                "waits for the other partitions to end: "
                + ", ".join(k.role for k in kids if not k.finished)
            )
        )
    me.joining = ()
    for kid in kids:
        me.clock.acquire(kid.clock.snapshot())
    me.role = role
    machine.effects += 1
    return result


def _spawn(
    parent: object,
    partition: int,
    role: str,
    warps: int,
    fn: Callable,
    args: Sequence,
    start: object,
) -> object:
    from .machine import Task, end_task

    machine = parent.machine
    slot = machine.slot(parent.rank, parent.program, partition)

    def body(task: Task) -> None:
        fn(*args)
        end_task(task)
        del machine.tasks[task]
        task.finished = True
        machine.effects += 1
        if parent.joining and all(k.finished for k in parent.joining):
            parent.wake()

    task = Task(
        machine,
        parent.launch,
        parent.program,
        parent.cta,
        role,
        warps,
        lambda t: Clock(machine.order, slot, start, t, parent.clock),
        body,
    )
    machine.tasks[task] = None
    machine.ready.append(task)
    return task
