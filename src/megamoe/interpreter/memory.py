"""Global memory: addresses over NumPy arrays, and what is remembered about every byte.

An access is a number of *runs*: `addr` (an int, or an int64 array of run starts) and the bytes of
one run.  A tile whose rows are contiguous is one run a row; lanes at unrelated addresses are runs
of one element.
"""

from __future__ import annotations

import bisect

import numpy as np

from . import dtypes as dt
from .errors import KernelError, Misaligned, OutOfBounds
from .order import UNWRITTEN, Flag
from .values import Pointer, Tensor

_BASE = 1 << 32
_ALIGN = 1 << 12
COARSEST = 16
_FEW = 64  # up to so many runs, plain Python is quicker than NumPy


class Shadow:
    """Last writing event and reading set of every granule of `[lo, hi)` of an allocation."""

    __slots__ = ("grain", "hi", "lo", "read", "write")

    def __init__(self, lo: int, hi: int, written: bool):
        self.lo, self.hi = lo, hi
        self.grain = COARSEST
        count = -(-(hi - lo) // COARSEST)
        self.write = np.full(count, 0 if written else UNWRITTEN, np.int32)
        self.read = np.zeros(count, np.int32)

    def refine(self, grain: int) -> None:
        """Go over to granules of `grain` bytes, a power of two below the present one."""
        times = self.grain // grain
        self.write, self.read = np.repeat(self.write, times), np.repeat(self.read, times)
        self.grain = grain

    def fit(self, start: object, nbytes: int) -> None:
        """Refine until an access with these (relative) run starts covers whole granules."""
        bits = nbytes | (start if type(start) is int else int(np.bitwise_or.reduce(start)))
        if bits & (self.grain - 1):
            self.refine(bits & -bits)


class Allocation:
    """One registered array: `data` are its bytes."""

    def __init__(
        self, base: int, data: np.ndarray, rank: int, name: str, written: bool, readonly: bool
    ):
        self.base, self.data, self.rank, self.name, self.readonly = base, data, rank, name, readonly
        self.size = data.size
        self.end = base + data.size
        self.views: dict[np.dtype, np.ndarray] = {}
        self.shadows = [Shadow(0, self.size, written)]
        self.starts = [0]
        self.labels: list[tuple[int, int, str, int]] = []
        self.flags: dict[int, Flag] = {}
        self.watchers: dict[int, list] = {}

    def view(self, dtype: np.dtype) -> np.ndarray:
        out = self.views.get(dtype)
        if out is None:
            usable = self.size // dtype.itemsize * dtype.itemsize
            out = self.views[dtype] = self.data[:usable].view(dtype)
        return out

    def flag(self, offset: int) -> Flag:
        out = self.flags.get(offset)
        if out is None:
            out = self.flags[offset] = Flag()
        return out

    def shadow(self, lo: int, hi: int) -> Shadow:
        """The shadow that covers `[lo, hi)`; shadows that an access spans become one."""
        i = bisect.bisect_right(self.starts, lo) - 1
        shadow = self.shadows[i]
        while hi > shadow.hi:
            self._merge(i)
            shadow = self.shadows[i]
        return shadow

    def cut(self, offset: int) -> None:
        """Begin a new shadow at `offset`."""
        i = bisect.bisect_right(self.starts, offset) - 1
        old = self.shadows[i]
        if offset == old.lo or offset >= old.hi:
            return
        old.fit(offset - old.lo, 0)
        at = (offset - old.lo) // old.grain
        new = Shadow(offset, offset, True)
        new.hi, new.grain = old.hi, old.grain
        new.write, new.read = old.write[at:].copy(), old.read[at:].copy()
        old.hi, old.write, old.read = offset, old.write[:at].copy(), old.read[:at].copy()
        self.shadows.insert(i + 1, new)
        self.starts.insert(i + 1, offset)

    def _merge(self, i: int) -> None:
        a, b = self.shadows[i], self.shadows[i + 1]
        grain = min(a.grain, b.grain)
        for s in (a, b):
            if s.grain > grain:
                s.refine(grain)
        edge = (a.hi - a.lo) // grain
        a.write = np.concatenate([a.write[:edge], b.write])
        a.read = np.concatenate([a.read[:edge], b.read])
        a.hi = b.hi
        del self.shadows[i + 1], self.starts[i + 1]

    def mark(self, offset: int, nbytes: int, event: int) -> None:
        shadow = self.shadow(offset, offset + nbytes)
        shadow.fit(offset - shadow.lo, nbytes)
        a = (offset - shadow.lo) // shadow.grain
        b = (offset + nbytes - shadow.lo) // shadow.grain
        shadow.write[a:b] = event

    def describe(self, offset: int) -> str:
        """Region name and index of a byte, for messages."""
        for lo, hi, name, itemsize in self.labels:
            if lo <= offset < hi:
                return f"{name}[{(offset - lo) // itemsize}] of rank {self.rank}"
        return f"{self.name}+{offset:#x} of rank {self.rank}"


class Runs:
    """Runs inside one allocation: `start` an offset or an int64 array of offsets, `nbytes` of each
    run.
    """

    __slots__ = ("alloc", "index", "nbytes", "start", "stride")

    def __init__(self, alloc: Allocation, start: object, nbytes: int):
        self.alloc, self.nbytes, self.stride = alloc, nbytes, 0
        self.index = {}
        if type(start) is not int and start.size == 1:
            start = int(start[0])
        elif type(start) is not int and start.size > 1:
            step = int(start[1]) - int(start[0])
            if (
                step >= nbytes
                and int(start[-1]) - int(start[0]) == step * (start.size - 1)
                and bool((start[1:] - start[:-1] == step).all())
            ):
                if step == nbytes:
                    self.nbytes = nbytes * start.size
                    start = int(start[0])
                else:
                    self.stride = step
        self.start = start

    def bounds(self) -> tuple[int, int]:
        if type(self.start) is int:
            return self.start, self.start + self.nbytes
        if self.stride:
            return int(self.start[0]), int(self.start[-1]) + self.nbytes
        return int(self.start.min()), int(self.start.max()) + self.nbytes

    def get(self, flat: np.ndarray, unit: int, lo: int = 0) -> tuple[np.ndarray, np.ndarray | None]:
        """The elements of `unit` bytes in `flat`, which begins at offset `lo`: (a view, None), or
        (a copy, its index).
        """
        start, count = self.start, self.nbytes // unit
        if type(start) is int:
            at = (start - lo) // unit
            return flat[at : at + count], None
        if self.stride and self.stride % unit == 0:
            size = flat.itemsize
            at = (int(start[0]) - lo) // unit * size
            return np.ndarray(
                (start.size, count), flat.dtype, flat, at, (self.stride // unit * size, size)
            ), None
        key = (unit, lo)
        index = self.index.get(key)
        if index is None:
            index = (start - lo) // unit
            index = index[:, None] + np.arange(count) if count > 1 else index
            self.index[key] = index
        return flat[index], index


def put(flat: np.ndarray, window: tuple[np.ndarray, np.ndarray | None], value: object) -> None:
    """Assign through what `Runs.get` returned."""
    view, index = window
    if index is None:
        view[...] = value
    else:
        flat[index] = value


class Memory:
    """All allocations of all ranks, by address."""

    def __init__(self) -> None:
        self.allocations: list[Allocation] = []
        self._bases: list[int] = []
        self._starts = np.zeros(0, np.int64)
        self._next = _BASE
        self._recent: Allocation | None = None

    def add(
        self, data: np.ndarray, rank: int, name: str, written: bool, readonly: bool
    ) -> Allocation:
        alloc = Allocation(self._next, data, rank, name, written, readonly)
        # The gap between buffers catches addresses that run off an end.
        self._next += -(-(data.size + _ALIGN) // _ALIGN) * _ALIGN
        self.allocations.append(alloc)
        self._bases.append(alloc.base)
        self._starts = np.array(self._bases, np.int64)
        return alloc

    def at(self, lo: int, hi: int) -> Allocation:
        """The allocation that holds addresses `[lo, hi)`."""
        alloc = self._recent
        if alloc is None or not alloc.base <= lo or not hi <= alloc.end:
            i = bisect.bisect_right(self._bases, lo) - 1
            alloc = self.allocations[i] if i >= 0 else None
            if alloc is None or hi > alloc.end:
                raise OutOfBounds(self._outside(lo, hi, alloc))
            self._recent = alloc
        return alloc

    def _outside(self, lo: int, hi: int, before: Allocation | None) -> str:
        text = f"addresses {lo:#x} to {hi - 1:#x} are in no registered buffer"
        if before is not None:
            text += (
                f" (nearest below: {before.name} of rank {before.rank}, "
                f"{before.size} bytes, this is byte {lo - before.base})"
            )
        return text

    def split(self, addr: object, nbytes: int) -> list[tuple[Runs, np.ndarray | None]]:
        """The runs by allocation, each with the positions of its runs among all (None: all of
        them).
        """
        if type(addr) is int:
            alloc = self.at(addr, addr + nbytes)
            return [(Runs(alloc, addr - alloc.base, nbytes), None)]
        if addr.size == 0:
            return []
        lo, hi = int(addr.min()), int(addr.max())
        i = bisect.bisect_right(self._bases, lo) - 1
        if i >= 0 and hi + nbytes <= self.allocations[i].end:
            alloc = self.allocations[i]
            return [(Runs(alloc, addr - alloc.base, nbytes), None)]
        if addr.size <= _FEW:
            return self._split_few(addr.tolist(), nbytes)
        owner = np.searchsorted(self._starts, addr, side="right") - 1
        out = []
        for i in np.unique(owner):
            where = np.flatnonzero(owner == i)
            mine = addr[where]
            alloc = self.at(int(mine.min()), int(mine.min()) + nbytes)
            self.at(int(mine.max()), int(mine.max()) + nbytes)
            out.append((Runs(alloc, mine - alloc.base, nbytes), where))
        return out

    def _split_few(self, addresses: list[int], nbytes: int) -> list[tuple[Runs, np.ndarray | None]]:
        """`split` of a handful of runs, without NumPy's overhead."""
        groups: dict[Allocation, tuple[list[int], list[int]]] = {}
        for row, address in enumerate(addresses):
            alloc = self.at(address, address + nbytes)
            starts, rows = groups.setdefault(alloc, ([], []))
            starts.append(address - alloc.base)
            rows.append(row)
        return [
            (Runs(alloc, np.array(starts, np.int64), nbytes), np.array(rows))
            for alloc, (starts, rows) in groups.items()
        ]

    def describe(self, address: int) -> str:
        i = bisect.bisect_right(self._bases, address) - 1
        if i < 0 or address >= self.allocations[i].end:
            return f"address {address:#x}"
        return self.allocations[i].describe(address - self._bases[i])


class Access:
    """The lanes of a pointer tensor, after the mask, as runs; and the way between runs and the
    tensor's shape.
    """

    __slots__ = (
        "addr",
        "cols",
        "cols_total",
        "count",
        "flip",
        "keep",
        "rows_total",
        "shape",
        "size",
    )

    def __init__(self, pointer: Pointer, mask: Tensor | None, size: int):
        self.size, self.shape = size, pointer.shape
        self.keep = None
        self._find_runs(pointer)
        self.cols = slice(0, self.cols_total)
        if mask is not None:
            self._apply(pointer, mask)
        self.count = self.cols.stop - self.cols.start
        bad = (
            self.addr % size
            if type(self.addr) is int
            else int(np.bitwise_or.reduce(self.addr, initial=0)) % size
        )
        if bad and size > 1:
            raise Misaligned(f"an address is not a multiple of {size}, the size of its elements")

    @property
    def empty(self) -> bool:
        return type(self.addr) is not int and self.addr.size == 0

    def _find_runs(self, p: Pointer) -> None:
        """Set addr, rows_total, cols_total and flip for the unmasked tensor."""
        self.flip, self.rows_total, self.cols_total = False, 1, 1
        if not p.terms and not p.shape:
            self.addr = p.base
            return
        if len(p.terms) == 1 and p.terms[0].size == 1 and p.shape == p.terms[0].shape:
            self.addr = p.base + int(p.terms[0].reshape(-1)[0])
            return
        if len(p.terms) == 1 and p.terms[0].ndim == 1 and p.terms[0].shape == p.shape:
            if self._contiguous(p.terms[0]):
                self.addr, self.cols_total = p.base + int(p.terms[0][0]), p.terms[0].size
            else:
                self.addr, self.rows_total = p.terms[0] + p.base, p.terms[0].size
            return
        if len(p.shape) > 1 and (self._rows(p) or len(p.shape) == 2 and self._columns(p)):
            return
        self._dense(np.asarray(p.v, np.int64))

    def _rows(self, p: Pointer) -> bool:
        """Whether the last dimension is contiguous and the others add offsets of their own: one run
        a row.
        """
        *outer, cols = p.shape
        row = self._line(p, -1)
        if row is None:
            return False
        starts = np.full(outer, p.base + int(row.flat[0]), np.int64)
        for t in p.terms:
            if t is not row:
                starts += t[..., 0]
        self.addr, self.rows_total, self.cols_total = starts.reshape(-1), starts.size, cols
        return True

    def _columns(self, p: Pointer) -> bool:
        """The same with the first of two dimensions contiguous: one run a column."""
        rows, cols = p.shape
        column = self._line(p, 0)
        if column is None:
            return False
        starts = np.full(cols, p.base + int(column.flat[0]), np.int64)
        for t in p.terms:
            if t is not column:
                starts += t[0]
        self.addr, self.rows_total, self.cols_total, self.flip = starts, cols, rows, True
        return True

    def _line(self, p: Pointer, axis: int) -> np.ndarray | None:
        """The one term that depends on this axis, if it depends on no other and is contiguous."""
        found = None
        for t in p.terms:
            if t.ndim != len(p.shape):
                return None
            if t.shape[axis] != 1:
                if found is not None or t.size != t.shape[axis]:
                    return None
                found = t
        if found is None or found.size != p.shape[axis] or not self._contiguous(found.reshape(-1)):
            return None
        return found

    def _dense(self, a: np.ndarray) -> None:
        if a.ndim == 2 and a.shape[1] > 1 and bool((a[:, 1:] - a[:, :-1] == self.size).all()):
            self.addr, self.rows_total, self.cols_total = a[:, 0], *a.shape
        elif a.ndim == 2 and a.shape[0] > 1 and bool((a[1:] - a[:-1] == self.size).all()):
            self.addr, self.cols_total, self.rows_total, self.flip = a[0], *a.shape, True
        else:
            self.addr, self.rows_total = a.reshape(-1), a.size

    def _contiguous(self, t: np.ndarray) -> bool:
        n = t.size
        return n == 1 or (
            int(t[-1]) - int(t[0]) == (n - 1) * self.size
            and bool((t[1:] - t[:-1] == self.size).all())
        )

    def _apply(self, p: Pointer, mask: Tensor) -> None:
        """Leave out the lanes that are masked off."""
        m = mask.v
        if type(m) is not np.ndarray:
            if not m:
                self._nothing()
            return
        if m.all():
            return
        if not m.any():
            self._nothing()
            return
        if m.size == self.rows_total == m.shape[0] and not self.flip and self.rows_total > 1:
            self.keep = np.flatnonzero(m)
            self.addr = self.addr[self.keep]
            return
        m = np.broadcast_to(m, self.shape)
        grid = m.T if self.flip else m
        grid = grid.reshape(self.rows_total, self.cols_total)
        rows, cols = grid.any(axis=1), grid.any(axis=0)
        first, last = int(cols.argmax()), self.cols_total - int(cols[::-1].argmax())
        if last - first == np.count_nonzero(cols) and bool((grid == (rows[:, None] & cols)).all()):
            self.cols = slice(first, last)
            if not rows.all():
                self.keep = np.flatnonzero(rows)
                self.addr = self.addr[self.keep] if type(self.addr) is not int else self.addr
            self.addr = self.addr + first * self.size
            return
        self._lanes(grid)

    def _lanes(self, grid: np.ndarray) -> None:
        """No rectangle of lanes is left: one run a lane."""
        starts = np.asarray(self.addr).reshape(-1, 1) + np.arange(self.cols_total) * self.size
        self.keep = np.flatnonzero(grid)
        self.addr = starts.reshape(-1)[self.keep]
        self.rows_total, self.cols_total = self.rows_total * self.cols_total, 1
        self.cols = slice(0, 1)

    def _nothing(self) -> None:
        self.addr = np.zeros(0, np.int64)
        self.keep = np.zeros(0, np.int64)

    def to_tensor(self, data: np.ndarray, fill: object) -> np.ndarray:
        """An array of the tensor's shape from run data [runs, count]; `fill` (a number or array)
        elsewhere.
        """
        data = data.reshape(-1, self.count)
        if self.keep is not None or self.count != self.cols_total:
            out = self._filled(fill, data.dtype)
            if self.keep is None:
                out[:, self.cols] = data
            elif self.keep.size:
                out[self.keep, self.cols] = data
            data = out
        return self._back(data)

    def _back(self, grid: np.ndarray) -> np.ndarray:
        if self.flip:
            # As the tensor's columns, also where single lanes are the runs.
            return grid.reshape(self.shape[1], self.shape[0]).T.reshape(self.shape)
        return grid.reshape(self.shape)

    def _grid(self, value: np.ndarray) -> np.ndarray:
        """The tensor (broadcast to its shape) as [rows_total, cols_total]."""
        if value.shape != self.shape:
            value = np.broadcast_to(value, self.shape)
        return (value.T if self.flip else value).reshape(self.rows_total, self.cols_total)

    def _filled(self, fill: object, dtype: np.dtype) -> np.ndarray:
        if isinstance(fill, np.ndarray):
            return self._grid(fill).astype(dtype)
        return np.full((self.rows_total, self.cols_total), fill, dtype)

    def from_tensor(self, value: np.ndarray) -> np.ndarray:
        """Run data [runs, count] of a tensor (or a number) that is stored."""
        grid = self._grid(np.asarray(value))
        if self.keep is not None:
            return grid[self.keep, self.cols]
        return grid[:, self.cols]


def as_bytes(array: object) -> np.ndarray:
    """The bytes of a contiguous NumPy array or CPU torch tensor, without a copy."""
    if hasattr(array, "data_ptr"):
        import torch

        if array.device.type != "cpu" or not array.is_contiguous():
            raise KernelError("only contiguous CPU tensors can be registered")
        return array.detach().reshape(-1).view(torch.uint8).numpy()
    if not isinstance(array, np.ndarray) or not array.flags.c_contiguous:
        raise KernelError(
            f"a contiguous NumPy array or CPU tensor is needed, not {type(array).__name__}"
        )
    return array.reshape(-1).view(np.uint8)


def load_raw(runs: Runs, dtype: dt.DType) -> np.ndarray:
    """Copy of the elements, as memory holds them, shape [runs, elements of a run]."""
    view, index = runs.get(runs.alloc.view(dtype.store), dtype.itemsize)
    return view.copy() if index is None else view


def store_raw(runs: Runs, dtype: dt.DType, raw: np.ndarray) -> None:
    flat = runs.alloc.view(dtype.store)
    start = runs.start
    if type(start) is int or runs.stride and runs.stride % dtype.itemsize == 0:
        view, _ = runs.get(flat, dtype.itemsize)
        view[...] = raw.reshape(view.shape)
    else:
        count = runs.nbytes // dtype.itemsize
        index = start // dtype.itemsize
        index = index[:, None] + np.arange(count) if count > 1 else index
        flat[index] = raw.reshape(index.shape)
