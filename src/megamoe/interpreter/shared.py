"""Shared memory of a program: allocations, views, and who may read or overwrite what."""

from __future__ import annotations

import linecache
import re

import numpy as np
from greenlet import getcurrent

from . import dtypes as dt
from .arith import cast
from .dtypes import DType
from .errors import OutOfBounds, ProxyFault, SharedMemoryRace, UnsupportedOperation, UnwrittenRead
from .faults import line, party, where
from .order import ASYNC, GENERIC, IN_FLIGHT, UNWRITTEN, Clock, same
from .values import ANY_LAYOUT, Tensor, as_tensor, shape_of, wrap

_NAMES: dict[tuple, str] = {}


def variable_name(place: tuple) -> str:
    """Name of the variable that the kernel assigns at this place, or the place."""
    name = _NAMES.get(place)
    if name is None:
        code, _ = place
        at = line(place)
        text = (
            linecache.getline(code.co_filename, int(at.rsplit(":", 1)[1]))
            if code is not None
            else ""
        )
        found = re.match(r"\s*([\w.]+)(?:\s*:[^=]*)?\s*=", text)
        name = _NAMES[place] = found[1] if found else f"shared memory of {at}"
    return name


class SharedMemory:
    """A (view of a) shared memory tensor.

    `data` are the elements in memory format, permuted as the view is.  `write` and `read` are its
    granules, in the allocation's own order of dimensions: last writing event and set of reading
    events.
    """

    __slots__ = (
        "barrier",
        "data",
        "dtype",
        "grain",
        "kids",
        "name",
        "offset",
        "order",
        "read",
        "write",
    )

    def __init__(
        self,
        data: np.ndarray,
        dtype: DType,
        write: np.ndarray,
        read: np.ndarray,
        grain: int,
        name: str,
        order: tuple[int, ...],
        offset: int = 0,
    ):
        self.data, self.dtype, self.write, self.read, self.grain = data, dtype, write, read, grain
        self.name, self.order, self.offset = name, order, offset
        self.kids: dict[tuple, SharedMemory] = {}
        self.barrier = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    @property
    def rank(self) -> int:
        return self.data.ndim

    @property
    def numel(self) -> int:
        return self.data.size

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    nbytes_per_cta = nbytes

    @property
    def layout(self) -> object:
        return ANY_LAYOUT

    @property
    def type(self) -> SharedMemory:
        return self

    @property
    def element_ty(self) -> DType:
        return self.dtype

    def __repr__(self) -> str:
        return f"{self.name} ({self.dtype}, {list(self.shape)})"

    def _kid(
        self,
        key: tuple,
        data: np.ndarray,
        write: np.ndarray,
        read: np.ndarray,
        name: str,
        order: tuple[int, ...],
        offset: int = 0,
    ) -> SharedMemory:
        kid = SharedMemory(data, self.dtype, write, read, self.grain, name, order, offset)
        self.kids[key] = kid
        return kid

    def index(self, index: object) -> SharedMemory:
        i = index if type(index) is int else int(as_tensor(index).v)
        kid = self.kids.get(("i", i))
        if kid is not None:
            return kid
        if not 0 <= i < self.data.shape[0]:
            raise OutOfBounds(f"index {i} of {self.name}, which has {self.data.shape[0]}")
        name = f"{self.name}[{i}]"
        if self.data.ndim == 1:
            kid = self.slice(i, 1)
            kid.name = name
            self.kids["i", i] = kid
            return kid
        if self.order[0] != 0:
            raise UnsupportedOperation("index of a permuted shared memory view")
        order = tuple(o - 1 for o in self.order[1:])
        return self._kid(
            ("i", i), self.data[i], self.write[i], self.read[i], name, order, self.offset
        )

    def slice(self, start: object, length: object, dim: object = 0) -> SharedMemory:
        first = start if type(start) is int else int(as_tensor(start).v)
        count = length if type(length) is int else int(as_tensor(length).v)
        key = ("s", first, count, dim)
        kid = self.kids.get(key)
        if kid is not None:
            return kid
        if not (0 <= first and count > 0 and first + count <= self.data.shape[dim]):
            raise OutOfBounds(
                f"slice {first} to {first + count - 1} of dimension {dim} of {self.name}, "
                f"whose shape is {list(self.shape)}"
            )
        data = self.data[(slice(None),) * dim + (slice(first, first + count),)]
        base, offset = self.order[dim], self.offset
        lo, hi = first, first + count
        if base == self.data.ndim - 1:
            size = self.dtype.itemsize
            before = self.offset // self.grain
            offset = self.offset + first * size
            lo, hi = (
                offset // self.grain - before,
                -(-(offset + count * size) // self.grain) - before,
            )
        key2 = (slice(None),) * base + (slice(lo, hi),)
        name = f"{self.name}[{', '.join([':'] * dim + [f'{first}:{first + count}'])}]"
        return self._kid(key, data, self.write[key2], self.read[key2], name, self.order, offset)

    def permute(self, *order: object) -> SharedMemory:
        order = tuple(shape_of(order))
        kid = self.kids.get(("p", order))
        if kid is not None:
            return kid
        inner = tuple(self.order[o] for o in order)
        return self._kid(
            ("p", order),
            self.data.transpose(order),
            self.write,
            self.read,
            self.name,
            inner,
            self.offset,
        )

    def reshape(self, *shape: object) -> SharedMemory:
        return self._reinterpret(self.dtype, shape_of(shape), None)

    def _reinterpret(self, dtype: DType, shape: object, layout: object) -> SharedMemory:
        dtype, shape = dt.as_dtype(dtype), shape_of([shape])
        key = ("r", dtype, tuple(shape))
        kid = self.kids.get(key)
        if kid is not None:
            return kid
        nbytes = int(np.prod(shape)) * dtype.itemsize
        last = shape[-1] * dtype.itemsize
        if (
            not (self.data.flags.c_contiguous and self.write.flags.c_contiguous)
            or last % self.grain
        ):
            raise UnsupportedOperation(
                f"reshape or reinterpret of the view {self!r} to {dtype} {shape}"
            )
        if nbytes > self.data.nbytes:
            raise OutOfBounds(
                f"{self.name} has {self.data.nbytes} bytes, reinterpreted as {nbytes}"
            )
        data = self.data.reshape(-1).view(np.uint8)[:nbytes].view(dtype.store).reshape(shape)
        grains = [*shape[:-1], last // self.grain]
        n = nbytes // self.grain
        kid = self._kid(
            key,
            data,
            self.write.reshape(-1)[:n].reshape(grains),
            self.read.reshape(-1)[:n].reshape(grains),
            self.name,
            tuple(range(len(shape))),
        )
        kid.dtype = dtype
        return kid

    reinterpret = _reinterpret

    def load(self, layout: object = None) -> Tensor:
        task = getcurrent()
        check_shared_read(task.clock, self, task.clock.event(GENERIC, where()), False)
        return wrap(dt.decode(self.data.copy(), self.dtype), self.dtype)

    def store(self, value: object) -> None:
        task = getcurrent()
        value = cast(as_tensor(value), self.dtype, False)
        if value.shape != self.shape:
            raise ValueError(f"stores a tensor of shape {list(value.shape)} to {self!r}")
        check_shared_write(task.clock, self, task.clock.event(GENERIC, where()), "overwrites")
        self.data[...] = dt.encode(value.v, self.dtype)
        task.effect()

    def _keep_alive(self) -> None:
        """Only matters to the compiler."""


def allocate(
    dtype: DType, shape: object, layout: object = None, value: object = None
) -> SharedMemory:
    """A new allocation; reading it before something has been written is an error."""
    dtype, shape = dt.as_dtype(dtype), shape_of([shape])
    size = dtype.itemsize
    last = shape[-1] * size
    grain = min(16, last & -last)
    if int(np.prod(shape)) * size <= 2048:
        grain = size
    grains = [*shape[:-1], last // grain]
    data = np.full(int(np.prod(shape)) * size, 0xA5, np.uint8).view(dtype.store).reshape(shape)
    out = SharedMemory(
        data,
        dtype,
        np.full(grains, UNWRITTEN, np.int32),
        np.zeros(grains, np.int32),
        grain,
        variable_name(where()),
        tuple(range(len(shape))),
    )
    if value is not None:
        out.store(value)
    return out


def check_shared_read(clock: Clock, view: SharedMemory, event: int, by_async: bool) -> None:
    """Raise unless the view was written before (and fenced, for the async proxy); remember the
    read.
    """
    write, order = view.write, clock.order
    last = same(write)
    if last is None or last < 0:
        _check_filled(view, write)
    if last is None or not clock.knows(last):
        bad = order.unordered(write, clock)
        if bad:
            what = "filled by TMA" if order.kinds[bad] == ASYNC else "written"
            raise SharedMemoryRace(
                f"reads {view.name}, {what} by {party(order.info[bad])}, without a wait for it"
                " (mbarrier wait, or barrier)"
            )
    if by_async:
        bad = order.unfenced(write, clock, shared=True)
        if bad:
            raise ProxyFault(
                f"TMA or WGMMA reads {view.name}, written by ordinary stores of "
                f"{party(order.info[bad])}, "
                "without fence_async_shared() after them"
            )
    view.read[...] = order.after_reads(view.read, event, clock)


def _check_filled(view: SharedMemory, write: np.ndarray) -> None:
    low = int(write.min())
    if low == UNWRITTEN:
        raise UnwrittenRead(f"reads {view.name}, which nobody has written")
    if low == IN_FLIGHT:
        raise SharedMemoryRace(
            f"reads {view.name} while a TMA copy into it is under way: wait for its mbarrier first"
        )


def check_shared_write(clock: Clock, view: SharedMemory, event: int, verb: str) -> None:
    """Raise unless all earlier users of the view are done with it; `event` (or IN_FLIGHT) becomes
    its writer.
    """
    write, order = view.write, clock.order
    last = same(write)
    if last == IN_FLIGHT or last is None and int(write.min()) == IN_FLIGHT:
        raise SharedMemoryRace(f"{verb} {view.name} while a TMA copy into it is under way")
    bad = order.unordered(write, clock)
    if bad:
        raise SharedMemoryRace(
            f"{verb} {view.name}, written by {party(order.info[bad])}, without an order between"
        )
    bad = order.unordered_reader(view.read, clock)
    if bad:
        raise SharedMemoryRace(
            f"{verb} {view.name}, which {party(order.info[bad])} "
            f"({order.kind_name(bad)} read) "
            "has not released: wait for its arrival at an mbarrier first"
        )
    view.read[...] = 0
    view.write[...] = event
