"""Checks of every access to global memory: written, ordered, fenced."""

from __future__ import annotations

import numpy as np

from .errors import DataRace, KernelError, ProxyFault, UnwrittenRead
from .faults import party
from .memory import Allocation, Runs, put
from .order import ASYNC, ATOMIC_GPU, KIND_NAMES, Clock, Order, same


def _span(runs: Runs) -> tuple[object, np.ndarray]:
    lo, hi = runs.bounds()
    shadow = runs.alloc.shadow(lo, hi)
    shadow.fit(runs.start - shadow.lo, runs.nbytes)
    return shadow, runs.get(shadow.write, shadow.grain, shadow.lo)


def check_read(clock: Clock, runs: Runs, event: int, kind: int) -> None:
    """Raise unless what these runs hold was written before, and remember that `event` read it.

    `kind` ASYNC is a TMA load, whose event is not the task's own; the check is against the issuing
    task's clock.
    """
    if runs.alloc.readonly:
        return
    order = clock.order
    shadow, (write, _) = _span(runs)
    last = same(write)
    if last is None or last < 0:
        write = _only_written(runs, shadow, write, kind)
    if last is None or not clock.knows(last):
        bad = order.unordered(write, clock, kind)
        if bad:
            raise DataRace(_race(order, runs, shadow, write, bad, kind, "reads"))
    if kind == ASYNC and last != 0:
        bad = order.unfenced(write, clock, shared=False)
        if bad:
            raise ProxyFault(_unfenced(order, runs, shadow, write, bad))
    window = runs.get(shadow.read, shadow.grain, shadow.lo)
    put(shadow.read, window, order.after_reads(window[0], event, clock))


def _only_written(runs: Runs, shadow: object, write: np.ndarray, kind: int) -> np.ndarray:
    """The writing events; raises if there is a granule without one."""
    missing = write < 0
    if not missing.any():
        return write
    # TMA moves whole boxes: rows that nobody wrote are garbage that the kernel may drop later
    if kind != ASYNC or missing.all():
        raise UnwrittenRead(f"reads {_at(runs, shadow, missing)}, which nobody has written")
    return np.maximum(write, 0)


def check_write(clock: Clock, runs: Runs, event: int, kind: int) -> None:
    """Raise unless all earlier accesses happened before, and remember `event` as the last write."""
    alloc = runs.alloc
    if alloc.readonly:
        raise KernelError(
            f"writes {alloc.describe(runs.bounds()[0])}, which was registered as read-only"
        )
    order = clock.order
    lo, hi = runs.bounds()
    shadow = alloc.shadow(lo, hi)
    shadow.fit(runs.start - shadow.lo, runs.nbytes)
    window = runs.get(shadow.write, shadow.grain, shadow.lo)
    bad = order.unordered(window[0], clock, kind)
    if bad:
        raise DataRace(_race(order, runs, shadow, window[0], bad, kind, "writes"))
    readers = runs.get(shadow.read, shadow.grain, shadow.lo)
    if same(readers[0]) != 0:
        bad = order.unordered_reader(readers[0], clock, kind)
        if bad:
            where = _at(
                runs,
                shadow,
                np.isin(readers[0], [s for s, e in enumerate(order.states) if bad in e]),
            )
            raise DataRace(
                f"{KIND_NAMES[kind]} write of {where}, which {party(order.info[bad])} has read "
                f"({order.kind_name(bad)}) without an order between the two; "
                "the reader must signal (release) and this task wait (acquire) in between"
            )
        # Atomics leave the readers on record: the next ordinary write must come after them too.
        if kind < ATOMIC_GPU:
            put(shadow.read, readers, 0)
    put(shadow.write, window, event)


def _at(runs: Runs, shadow: object, bad: np.ndarray) -> str:
    """Name of the first granule for which `bad` holds."""
    position = int(np.flatnonzero(bad.ravel())[0]) if bad.any() else 0
    per_run = max(1, runs.nbytes // shadow.grain)
    start = runs.start if type(runs.start) is int else int(runs.start[position // per_run])
    return runs.alloc.describe(start + position % per_run * shadow.grain)


def _race(
    order: Order, runs: Runs, shadow: object, ids: np.ndarray, bad: int, kind: int, verb: str
) -> str:
    what = order.kind_name(bad)
    hint = "there is no release by the writer and acquire by this task between the two"
    if kind >= ATOMIC_GPU and order.kinds[bad] >= ATOMIC_GPU:
        hint = "atomics of gpu scope do not reach another rank; both need scope sys"
    return (
        f"{verb} ({KIND_NAMES[kind]}) {_at(runs, shadow, ids == bad)}, written ({what}) by "
        f"{party(order.info[bad])}; {hint}"
    )


def _unfenced(order: Order, runs: Runs, shadow: object, ids: np.ndarray, bad: int) -> str:
    return (
        f"TMA reads {_at(runs, shadow, ids == bad)}, written by ordinary stores of "
        f"{party(order.info[bad])}, without fence.proxy.async on both sides "
        "(the writer's after its stores and before its release, the reader's after its acquire)"
    )


def check_scalar(
    clock: Clock, alloc: Allocation, offset: int, size: int, event: int, kind: int, writes: bool
) -> None:
    """`check_read` or `check_write` of one element, quickly; an atomic update is a write only."""
    shadow = alloc.shadow(offset, offset + size)
    start = offset - shadow.lo
    if (start | size) & (shadow.grain - 1):
        shadow.fit(start, size)
    grain = shadow.grain
    if size == grain:
        at = start // grain
        last = int(shadow.write[at])
        readers = int(shadow.read[at])
        order = clock.order
        if last >= 0 and (clock.knows(last) or order.compatible(last, kind, clock)):
            if not writes:
                state = order.after_read(readers, event, clock)
                if state != readers:
                    shadow.read[at] = state
                return
            if not alloc.readonly and (not readers or not order.late_reader(readers, clock, kind)):
                shadow.write[at] = event
                if kind < ATOMIC_GPU and readers:
                    shadow.read[at] = 0
                return
    runs = Runs(alloc, offset, size)
    (check_write if writes else check_read)(clock, runs, event, kind)
