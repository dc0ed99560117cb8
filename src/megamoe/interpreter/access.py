"""Loads, stores and atomics of a task on global memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from . import dtypes as dt
from .arith import cast
from .dtypes import DType
from .errors import Misaligned, UnsupportedOperation
from .faults import where
from .guard import check_read, check_scalar, check_write
from .memory import Access, Allocation, Runs, load_raw, store_raw
from .order import ATOMIC_GPU, ATOMIC_SYS, GENERIC
from .values import Pointer, Tensor, as_tensor, wrap

_SCOPES = ("cta", "gpu", "sys")


def element_type(pointer: object) -> DType:
    if type(pointer) is not Pointer:
        raise TypeError(
            f"a pointer is needed, not {getattr(pointer, 'dtype', type(pointer).__name__)}"
        )
    return pointer.dtype.element_ty


def _scalar_place(task: object, address: int, size: int) -> tuple[Allocation, int]:
    alloc = task.machine.memory.at(address, address + size)
    if address % size:
        raise Misaligned(
            f"address {address:#x} ({alloc.describe(address - alloc.base)}) is not a multiple "
            f"of {size}"
        )
    return alloc, address - alloc.base


def _is_true(mask: object) -> bool | None:
    """Whether a mask is plainly on or off; None if it has lanes."""
    if mask is None or mask is True:
        return True
    if isinstance(mask, Tensor) and type(mask.v) is np.ndarray:
        return None
    return bool(mask)


def load(task: object, pointer: Pointer, mask: object = None, other: object = None) -> Tensor:
    """Values at `pointer`; lanes that are masked off give `other`, or NaN (floats) and 0 (others)
    without one.
    """
    dtype = element_type(pointer)
    on = _is_true(mask)
    if not pointer.terms and not pointer._shape and on:
        alloc, offset = _scalar_place(task, pointer.base, dtype.itemsize)
        if task.machine.cost is not None:
            task.machine.cost.load(task, dtype.itemsize, alloc.rank)
        if not alloc.readonly:
            check_scalar(
                task.clock,
                alloc,
                offset,
                dtype.itemsize,
                task.clock.event(GENERIC, where()),
                GENERIC,
                False,
            )
        raw = alloc.view(dtype.store)[offset // dtype.itemsize]
        if dtype.kind in "iu":
            return wrap(int(raw), dtype)
        return wrap(dt.decode(np.asarray(raw), dtype), dtype)
    access = Access(pointer, None if on else as_tensor(mask), dtype.itemsize)
    fill = _fill(other, dtype)
    if access.empty:
        raw = np.zeros(0, dtype.store)
    else:
        raw = _read_runs(task, access, dtype)
    if fill is None or access.keep is None and access.count == access.cols_total:
        return wrap(dt.decode(access.to_tensor(raw, 0), dtype), dtype)
    if isinstance(fill, np.ndarray) and fill.shape != access.shape:
        fill = np.broadcast_to(fill, access.shape)
    return wrap(dt.decode(access.to_tensor(raw, fill), dtype), dtype)


def _fill(other: object, dtype: DType) -> object:
    """`other` as memory would hold it."""
    if other is None:
        if dtype.kind == "f":
            return dt.encode(np.asarray(np.nan, dtype.calc), dtype).item()
        return 127 if dtype.kind == "8" else 0
    value = cast(as_tensor(other), dtype, False)
    raw = dt.encode(np.asarray(value.v, dtype.calc), dtype)
    return raw if raw.ndim else raw.item()


def _read_runs(task: object, access: Access, dtype: DType) -> np.ndarray:
    clock = task.clock
    parts = task.machine.memory.split(access.addr, access.count * dtype.itemsize)
    clock.scattered = True
    event = 0
    out = None
    for runs, rows in parts:
        if not runs.alloc.readonly:
            event = event or clock.event(GENERIC, where())
            check_read(clock, runs, event, GENERIC)
        raw = load_raw(runs, dtype).reshape(-1, access.count)
        if task.machine.cost is not None:
            task.machine.cost.load(task, raw.nbytes, runs.alloc.rank)
        if rows is None:
            return raw
        if out is None:
            out = np.empty((access.addr.size, access.count), dtype.store)
        out[rows] = raw
    return out


def store(task: object, pointer: Pointer, value: object, mask: object = None) -> None:
    """Write `value` (converted to the pointer's type, broadcast) to the lanes that are on."""
    dtype = element_type(pointer)
    value = cast(as_tensor(value), dtype, False)
    clock = task.clock
    on = _is_true(mask)
    if not pointer.terms and not pointer._shape and on and not value.shape:
        alloc, offset = _scalar_place(task, pointer.base, dtype.itemsize)
        if task.machine.cost is not None:
            task.machine.cost.store(task, dtype.itemsize, alloc.rank)
        check_scalar(
            clock, alloc, offset, dtype.itemsize, clock.event(GENERIC, where()), GENERIC, True
        )
        raw = value.v if dtype.is_integer else dt.encode(np.asarray(value.v, dtype.calc), dtype)
        alloc.view(dtype.store)[offset // dtype.itemsize] = raw
        notify(alloc, offset, offset + dtype.itemsize)
        task.effect()
        return
    if value.shape and pointer.shape != value.shape:
        pointer = pointer.broadcast_to(np.broadcast_shapes(pointer.shape, value.shape))
    access = Access(pointer, None if on else as_tensor(mask), dtype.itemsize)
    if access.empty:
        return
    raw = access.from_tensor(dt.encode(np.asarray(value.v, dtype.calc), dtype))
    event = clock.event(GENERIC, where())
    for runs, rows in task.machine.memory.split(access.addr, access.count * dtype.itemsize):
        check_write(clock, runs, event, GENERIC)
        if task.machine.cost is not None:
            part = raw if rows is None else raw[rows]
            task.machine.cost.store(task, part.nbytes, runs.alloc.rank)
        store_raw(runs, dtype, raw if rows is None else raw[rows])
        notify_runs(runs)
    clock.scattered = True
    task.effect()


def notify(alloc: Allocation, lo: int, hi: int) -> None:
    """Wake who waits for a change in these bytes."""
    if alloc.watchers:
        for offset in [o for o in alloc.watchers if lo <= o < hi]:
            for waiter in list(alloc.watchers.get(offset, ())):
                waiter.wake()


def notify_runs(runs: Runs) -> None:
    if runs.alloc.watchers:
        notify(runs.alloc, *runs.bounds())


# --- atomics --------------------------------------------------------------------------------------


def check_order_words(sem: str, scope: str) -> None:
    if sem not in ("relaxed", "acquire", "release", "acq_rel"):
        raise ValueError(f"sem is {sem!r}; allowed are relaxed, acquire, release and acq_rel")
    if scope not in _SCOPES:
        raise ValueError(f"scope is {scope!r}; allowed are cta, gpu and sys")


def synchronise(
    task: object,
    places: list[tuple[Allocation, int]],
    sem: str,
    scope: str,
    op: str,
    whole_partition: bool,
) -> None:
    """The order that atomics (`op` "rmw", "load" or "store") at these places give."""
    clock = task.clock
    if task.machine.cost is not None:
        task.machine.cost.flag(task, scope)
    if op != "store":
        known = [f for f in (a.flags.get(o) for a, o in places) if f is not None]
        if sem in ("acquire", "acq_rel"):
            for f in known:
                clock.acquire(f.learn(task, scope))
        else:
            _learn_loosely(task, known, scope)
    if op == "load":
        return
    if op == "store":
        for a, o in places:
            if o in a.flags:
                a.flags[o].clear()
    if sem in ("release", "acq_rel"):
        k = clock.release(whole_partition)
        for a, o in places:
            a.flag(o).publish(task, scope, k)
        return
    # A relaxed write after a fence releases as far as the narrower of the two scopes.
    for level in _SCOPES[: _SCOPES.index(scope) + 1]:
        k = task.fence_release[level]
        if k is not None:
            for a, o in places:
                a.flag(o).publish(task, level, k)


def _learn_loosely(task: object, flags: list, scope: str) -> None:
    """What relaxed reads saw: a later fence turns it into an acquire."""
    for f in flags:
        for level, held in task.loose.items():
            got = f.learn(task, level if scope == "sys" else scope)
            if got is not None:
                task.loose[level] = got.join(held)


def fence(task: object, sem: str, scope: str) -> None:
    """fence.acq_rel / fence.sc / membar: makes relaxed reads before it acquires, relaxed writes
    after it releases.
    """
    clock = task.clock
    level = "sys" if scope == "sys" else "gpu"
    clock.acquire(task.loose[level])
    if level == "sys":
        clock.acquire(task.loose["gpu"])
    k = clock.release()
    for s in _SCOPES[: _SCOPES.index(scope) + 1]:
        task.fence_release[s] = k


Update = Callable[[np.ndarray, np.ndarray], np.ndarray]


def atomic(
    task: object,
    pointer: Pointer,
    value: object,
    mask: object,
    update: str,
    sem: str,
    scope: str,
    compare: object = None,
) -> Tensor:
    """Read, modify, write of every lane, in lane order; returns the old values."""
    check_order_words(sem, scope)
    dtype = element_type(pointer)
    value = cast(as_tensor(value), dtype, False)
    compare = None if compare is None else cast(as_tensor(compare), dtype, False)
    on = _is_true(mask)
    task.machine.events["atomics"] += 1
    if task.machine.cost is not None:
        task.machine.cost.atomic(task, scope)
    task.pause()
    if not pointer.terms and not pointer._shape and not value.shape:
        if not on:
            return wrap(0, dtype)
        return _atomic_scalar(task, pointer.base, dtype, value, update, sem, scope, compare)
    return _atomic_lanes(
        task, pointer, dtype, value, None if on else as_tensor(mask), update, sem, scope, compare
    )


def _new_value(update: str, old: object, value: object, compare: object, dtype: DType) -> object:
    """The updated Python number or NumPy scalar."""
    if update == "add":
        new = old + value
        if dtype.kind in "iu" and not dtype.lo <= new <= dtype.hi:
            new = (int(new) - dtype.lo) % (1 << dtype.bits) + dtype.lo
        return new
    if update == "cas":
        return value if old == compare else old
    return {
        "max": max,
        "min": min,
        "or": lambda a, b: a | b,
        "and": lambda a, b: a & b,
        "xor": lambda a, b: a ^ b,
        "xchg": lambda a, b: b,
    }[update](old, value)


def _atomic_scalar(
    task: object,
    address: int,
    dtype: DType,
    value: Tensor,
    update: str,
    sem: str,
    scope: str,
    compare: Tensor | None,
) -> Tensor:
    alloc, offset = _scalar_place(task, address, dtype.itemsize)
    place = where()
    kind = ATOMIC_SYS if scope == "sys" else ATOMIC_GPU
    view, at = alloc.view(dtype.store), offset // dtype.itemsize
    while True:
        clock = task.clock
        raw = view[at]
        old = int(raw) if dtype.kind in "iu" else dt.decode(np.asarray(raw), dtype)[()]
        new = _new_value(update, old, value.v, compare.v if compare is not None else None, dtype)
        changed = new != old
        check_scalar(clock, alloc, offset, dtype.itemsize, clock.event(kind, place), kind, False)
        if changed or sem in ("release", "acq_rel"):
            check_scalar(clock, alloc, offset, dtype.itemsize, clock.event(kind, place), kind, True)
        synchronise(task, [(alloc, offset)], sem, scope, "rmw", task.warps == 1)
        if changed:
            view[at] = new if dtype.kind in "iu" else dt.encode(np.asarray(new, dtype.calc), dtype)
            notify(alloc, offset, offset + dtype.itemsize)
            task.effect()
        elif poll_again(task, place, (alloc, offset), old):
            continue
        return wrap(old, dtype)


def poll_again(task: object, place: tuple, at: tuple[Allocation, int], seen: object) -> bool:
    """Whether a read of a flag must be repeated: it gave the same as before, so the task slept
    until a change.
    """
    key = (place, at)
    if task.polls.get(key) != (seen,):
        task.polls[key] = (seen,)
        return False
    task.soft = True
    places = [k[1] for k in task.polls]
    task.watch(
        places,
        lambda: (
            "polls "
            + ", ".join(
                f"{a.describe(o)} (is {task.polls[(p, (a, o))][0]})" for p, (a, o) in task.polls
            )
        ),
    )
    task.polls.clear()
    return True


def _atomic_lanes(
    task: object,
    pointer: Pointer,
    dtype: DType,
    value: Tensor,
    mask: Tensor | None,
    update: str,
    sem: str,
    scope: str,
    compare: Tensor | None,
) -> Tensor:
    shape = np.broadcast_shapes(pointer.shape, value.shape)
    if pointer.shape != shape:
        pointer = pointer.broadcast_to(shape)
    access = Access(pointer, mask, dtype.itemsize)
    if access.empty:
        return wrap(np.zeros(shape, dtype.calc), dtype)
    operand = access.from_tensor(np.asarray(value.v, dtype.calc)).reshape(-1)
    wanted = (
        access.from_tensor(np.asarray(compare.v, dtype.calc)).reshape(-1)
        if compare is not None
        else None
    )
    addresses = np.asarray(access.addr).reshape(-1, 1) + np.arange(access.count) * dtype.itemsize
    addresses = addresses.reshape(-1)
    clock = task.clock
    kind = ATOMIC_SYS if scope == "sys" else ATOMIC_GPU
    event = clock.event(kind, where())
    old = np.empty(addresses.size, dtype.calc)
    places = []
    for runs, rows in task.machine.memory.split(addresses, dtype.itemsize):
        lanes = slice(None) if rows is None else rows
        check_read(clock, runs, event, kind)
        check_write(clock, runs, event, kind)
        offsets = addresses[lanes] - runs.alloc.base
        old[lanes] = _update_lanes(
            runs.alloc.view(dtype.store),
            offsets // dtype.itemsize,
            operand[lanes],
            None if wanted is None else wanted[lanes],
            update,
            dtype,
        )
        if sem != "relaxed" or runs.alloc.flags or any(task.fence_release.values()):
            places += [(runs.alloc, o) for o in np.unique(offsets).tolist()]
        notify_runs(runs)
    synchronise(task, places, sem, scope, "rmw", True)
    task.effect()
    return wrap(access.to_tensor(old.reshape(-1, access.count), 0), dtype)


def _update_lanes(
    flat: np.ndarray,
    index: np.ndarray,
    operand: np.ndarray,
    wanted: np.ndarray | None,
    update: str,
    dtype: DType,
) -> np.ndarray:
    """Apply the updates in lane order; returns the old values."""
    if update == "add" and dtype.kind in "iu":
        return _add_lanes(flat, index, operand)
    old = np.empty(index.size, dtype.calc)
    for lane, i in enumerate(index.tolist()):
        value = dt.decode(flat[i : i + 1], dtype)[0]
        old[lane] = value
        new = _new_value(
            update, value, operand[lane], None if wanted is None else wanted[lane], dtype
        )
        flat[i : i + 1] = dt.encode(np.asarray([new], dtype.calc), dtype)
    return old


def _add_lanes(flat: np.ndarray, index: np.ndarray, operand: np.ndarray) -> np.ndarray:
    if index.size == 1 or bool((index[1:] > index[:-1]).all()):
        old = flat[index]
        flat[index] = old + operand
        return old
    by_address = np.argsort(index, kind="stable")
    where_, amounts = index[by_address], operand[by_address]
    total = np.cumsum(amounts, dtype=amounts.dtype)
    first = np.concatenate([[0], np.flatnonzero(where_[1:] != where_[:-1]) + 1])
    before = total - amounts
    lengths = np.diff(first, append=where_.size)
    old = np.empty_like(operand)
    old[by_address] = flat[where_] + before - np.repeat(before[first], lengths)
    last = first + lengths - 1
    flat[where_[last]] += total[last] - before[first]
    return old


# --- atomic (and volatile) loads and stores -------------------------------------------------------


def _kind(scope: str) -> int:
    return ATOMIC_SYS if scope == "sys" else ATOMIC_GPU


def load_flag(task: object, address: int, dtype: DType, sem: str, scope: str, place: tuple) -> int:
    """ld.relaxed / ld.acquire of one element; no pause and no sleep."""
    alloc, offset = _scalar_place(task, address, dtype.itemsize)
    kind = _kind(scope)
    check_scalar(
        task.clock, alloc, offset, dtype.itemsize, task.clock.event(kind, place), kind, False
    )
    synchronise(task, [(alloc, offset)], sem, scope, "load", True)
    return alloc.view(dtype.store)[offset // dtype.itemsize].item()


def store_flag(
    task: object, address: int, dtype: DType, value: object, sem: str, scope: str, place: tuple
) -> None:
    """st.relaxed / st.release of one element; `value` as memory holds it."""
    alloc, offset = _scalar_place(task, address, dtype.itemsize)
    kind = _kind(scope)
    check_scalar(
        task.clock, alloc, offset, dtype.itemsize, task.clock.event(kind, place), kind, True
    )
    synchronise(task, [(alloc, offset)], sem, scope, "store", True)
    alloc.view(dtype.store)[offset // dtype.itemsize] = value
    notify(alloc, offset, offset + dtype.itemsize)
    task.effect()


def update_flag(
    task: object,
    address: int,
    dtype: DType,
    update: str,
    value: object,
    compare: object,
    sem: str,
    scope: str,
    place: tuple,
) -> object:
    """atom / red on one element, with the value as memory holds it; returns the old one."""
    alloc, offset = _scalar_place(task, address, dtype.itemsize)
    kind = _kind(scope)
    view, at = alloc.view(dtype.store), offset // dtype.itemsize
    old = view[at].item()
    new = _new_value(update, old, value, compare, dtype)
    for writes in (False, True):
        check_scalar(
            task.clock, alloc, offset, dtype.itemsize, task.clock.event(kind, place), kind, writes
        )
    synchronise(task, [(alloc, offset)], sem, scope, "rmw", True)
    view[at] = new
    notify(alloc, offset, offset + dtype.itemsize)
    task.effect()
    return old


def load_atomic(task: object, pointer: Pointer, mask: object, sem: str, scope: str) -> Tensor:
    """`gl.atomic_load` of a scalar pointer."""
    check_order_words(sem, scope)
    dtype = element_type(pointer)
    if pointer._shape or not dtype.is_integer:
        raise UnsupportedOperation("gl.atomic_load of anything but an integer scalar")
    task.pause()
    if not _is_true(mask):
        return wrap(0, dtype)
    place = where()
    while True:
        value = load_flag(task, pointer.base, dtype, sem, scope, place)
        alloc = task.machine.memory.at(pointer.base, pointer.base + dtype.itemsize)
        if not poll_again(task, place, (alloc, pointer.base - alloc.base), value):
            return wrap(value, dtype)


def store_atomic(
    task: object, pointer: Pointer, value: object, mask: object, sem: str, scope: str
) -> None:
    """`gl.atomic_store` of a scalar."""
    check_order_words(sem, scope)
    dtype = element_type(pointer)
    value = cast(as_tensor(value), dtype, False)
    if pointer._shape or value.shape or not dtype.is_integer:
        raise UnsupportedOperation("gl.atomic_store of anything but an integer scalar")
    task.pause()
    if _is_true(mask):
        store_flag(task, pointer.base, dtype, value.v, sem, scope, where())
