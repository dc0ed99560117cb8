"""Hopper's mbarriers and TMA copies."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from greenlet import getcurrent

from . import dtypes as dt
from .access import notify_runs
from .dtypes import DType
from .errors import BarrierFault, KernelError, Misaligned, OutOfBounds
from .faults import line, mark_located, where
from .guard import check_read, check_write
from .memory import load_raw, store_raw
from .order import ASYNC, COPIES, IN_FLIGHT, STORE_READS, Knowledge, join
from .shared import SharedMemory, check_shared_read, check_shared_write
from .values import ANY_LAYOUT, Layout, Pointer, Scalar, as_tensor


def _on(pred: object) -> bool:
    return pred is True or bool(pred)


# --- mbarrier -------------------------------------------------------------------------------------


class Barrier:
    """State of one mbarrier: `phase` counts completed phases, `left` missing arrivals, `tx` missing
    bytes.
    """

    def __init__(self, name: str):
        self.name, self.valid = name, False
        self.phase = self.count = self.left = self.tx = self.in_flight = 0
        self.now: Knowledge | None = None
        self.known: list[Knowledge | None] = [None, None]
        self.waiters: list = []

    def require(self) -> None:
        if not self.valid:
            raise BarrierFault(
                f"{self.name} is used before mbarrier.init or after mbarrier.invalidate"
            )

    def arrive(self, count: int, k: Knowledge) -> None:
        self.require()
        self.left -= count
        if self.left < 0:
            raise BarrierFault(
                f"{self.name}: more arrivals than its count of {self.count} in one phase"
            )
        self.now = join(self.now, k)
        self._complete()

    def land(self, nbytes: int, k: Knowledge) -> None:
        self.require()
        self.in_flight -= 1
        self.tx -= nbytes
        self.now = join(self.now, k)
        self._complete()

    def _complete(self) -> None:
        if self.left:
            return
        if self.tx < 0:
            raise BarrierFault(
                f"{self.name}: {-self.tx} bytes more than mbarrier.expect announced have arrived"
            )
        if self.tx:
            return
        if self.in_flight:
            raise BarrierFault(
                f"{self.name}: the phase completes while {self.in_flight} TMA copies on it are "
                "under way; "
                "mbarrier.expect announced too few bytes"
            )
        self.known[self.phase & 1] = self.now
        self.phase += 1
        self.left, self.now = self.count, None
        waiters, self.waiters = self.waiters, []
        for task in waiters:
            task.wake()


def _barrier(view: SharedMemory) -> Barrier:
    if not isinstance(view, SharedMemory) or view.dtype is not dt.int64 or view.data.size != 1:
        raise BarrierFault(f"an mbarrier is one int64 in shared memory, not {view!r}")
    if view.barrier is None:
        view.barrier = Barrier(view.name)
        getcurrent().cta.barriers.append(view.barrier)
    return view.barrier


class mbarrier:  # noqa: N801 (stands for the module of that name)
    """`gluon.language.nvidia.hopper.mbarrier`."""

    @staticmethod
    def MBarrierLayout(*args: object, **kwargs: object) -> Layout:  # noqa: N802 (Triton's name)
        return Layout("MBarrierLayout", args, kwargs)

    @staticmethod
    def init(barrier: SharedMemory, count: int) -> None:
        b, count = _barrier(barrier), int(count)
        if b.valid:
            raise BarrierFault(f"{b.name} is initialised twice without mbarrier.invalidate")
        if count < 1:
            raise BarrierFault(f"{b.name}: count is {count}, at least 1 is needed")
        b.__init__(b.name)
        b.valid, b.count, b.left = True, count, count

    @staticmethod
    def invalidate(barrier: SharedMemory) -> None:
        b = _barrier(barrier)
        b.require()
        if b.waiters or b.tx:
            raise BarrierFault(f"{b.name} is invalidated while in use")
        b.valid = False

    @staticmethod
    def expect(
        barrier: SharedMemory,
        bytes: object = None,
        pred: object = True,
        bytes_per_cta: object = None,
        from_cta: object = None,
    ) -> None:
        if not _on(pred):
            return
        task, b = getcurrent(), _barrier(barrier)
        b.require()
        b.tx += int(as_tensor(bytes if bytes is not None else bytes_per_cta).v)
        b.arrive(1, task.clock.release())
        task.effect()

    @staticmethod
    def arrive(
        barrier: SharedMemory, *, count: object = 1, pred: object = True, from_cta: object = None
    ) -> None:
        if not _on(pred):
            return
        task, b = getcurrent(), _barrier(barrier)
        b.arrive(int(as_tensor(count).v), task.clock.release())
        task.effect()

    @staticmethod
    def wait(
        barrier: SharedMemory, phase: object, pred: object = True, deps: Sequence = ()
    ) -> None:
        if not _on(pred):
            return
        task, b = getcurrent(), _barrier(barrier)
        b.require()
        parity = int(as_tensor(phase).v)
        if parity not in (0, 1):
            raise BarrierFault(f"{b.name}: waits for phase {parity}; a phase is 0 or 1")
        task.pause()
        while b.phase & 1 == parity:
            b.waiters.append(task)
            task.block(
                lambda: (
                    f"waits for {b.name} to complete a phase of parity {parity}: {b.phase} phases "
                    f"are complete, {b.left} of {b.count} arrivals and {b.tx} bytes are missing"
                )
            )
        task.clock.acquire(b.known[parity])
        task.effect()


# --- TMA ------------------------------------------------------------------------------------------


class Descriptor:
    """A TMA descriptor of a row-major tensor in global memory."""

    def __init__(
        self,
        address: int,
        shape: list[int],
        dtype: DType,
        block_shape: list[int],
        stride: object = None,
    ):
        self.address, self.dims, self.dtype = address, shape, dtype
        self.block_shape = block_shape
        if len(shape) != len(block_shape):
            raise KernelError(f"shape {shape} and block_shape {block_shape} differ in length")
        if stride is None or isinstance(stride, int):
            strides = [1]
            for n in reversed(shape[1:]):
                strides.insert(0, strides[0] * n)
            if stride is not None:
                strides[0] = stride
        else:
            strides = list(stride)
        self.element_strides = strides
        self._check()

    def _check(self) -> None:
        size = self.dtype.itemsize
        if self.address % 16:
            raise Misaligned(
                f"a TMA descriptor's address must be a multiple of 16, not {self.address:#x}"
            )
        if self.element_strides[-1] != 1:
            raise Misaligned(
                f"a TMA descriptor's last stride must be 1, not {self.element_strides[-1]}"
            )
        for stride in self.element_strides[:-1]:
            if stride * size % 16:
                raise Misaligned(
                    f"a TMA descriptor's strides must be multiples of 16 bytes, not {stride * size}"
                )
        block_bytes = self.block_shape[-1] * size
        if block_bytes % 16:
            raise Misaligned(f"a TMA block's rows must be multiples of 16 bytes, not {block_bytes}")

    @property
    def layout(self) -> object:
        return ANY_LAYOUT

    @property
    def shape(self) -> tuple:
        return tuple(Scalar(n, dt.int32) for n in self.dims)

    @property
    def strides(self) -> tuple:
        return tuple(Scalar(n, dt.int64) for n in self.element_strides)

    @property
    def type(self) -> Descriptor:
        return self

    block_type = type

    @property
    def element_ty(self) -> DType:
        return self.dtype

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.block_shape)) * self.dtype.itemsize

    nbytes_per_cta = nbytes

    def box(self, coord: Sequence, box_shape: Sequence[int]) -> tuple[object, int, tuple]:
        """(run addresses, bytes of a run, region of the box that lies inside the tensor)."""
        at = [int(as_tensor(c).v) for c in coord]
        if len(at) != len(self.dims) or list(box_shape) != list(self.block_shape):
            raise KernelError(
                f"a copy at {at} of a box {list(box_shape)} with a descriptor of block_shape "
                f"{self.block_shape}"
            )
        size = self.dtype.itemsize
        if at[-1] * size % 16:
            raise Misaligned(
                f"TMA: the innermost coordinate {at[-1]} is not a multiple of 16 bytes"
            )
        low = [max(c, 0) for c in at]
        high = [min(c + n, d) for c, n, d in zip(at, box_shape, self.dims, strict=True)]
        region = tuple(
            slice(lo - c, max(hi - c, lo - c)) for lo, hi, c in zip(low, high, at, strict=True)
        )
        if any(hi <= lo for lo, hi in zip(low, high, strict=True)):
            return None, 0, region
        start = np.asarray(self.address + low[-1] * size, np.int64)
        for lo, hi, stride in zip(low[:-1], high[:-1], self.element_strides[:-1], strict=True):
            start = start[..., None] + np.arange(lo, hi, dtype=np.int64) * (stride * size)
        start = start.reshape(-1)
        return (int(start[0]) if start.size == 1 else start), (high[-1] - low[-1]) * size, region


class Copy:
    """A TMA copy under way, which lands at the simulated time `ns`."""

    def __init__(self, task: object, place: tuple, finish: Callable[[], None], ns: float):
        self.task, self.place, self.finish, self.done = task, place, finish, False
        self.ns = ns

    def land(self) -> None:
        try:
            self.finish()
        except KernelError as e:
            if not getattr(e, "located", False):
                mark_located(e, f"{line(self.place)}: {self.task.title}: {e.args[0]}")
            raise
        self.done = True


def _parts(
    task: object, desc: Descriptor, coord: Sequence, view: SharedMemory
) -> tuple[list, tuple]:
    if not isinstance(desc, Descriptor):
        raise KernelError(f"a TMA descriptor is needed, not {type(desc).__name__}")
    if view.dtype.itemsize != desc.dtype.itemsize:
        raise KernelError(f"the descriptor has {desc.dtype}, {view.name} has {view.dtype}")
    addr, nbytes, region = desc.box(coord, view.shape)
    if addr is None:
        return [], region
    parts = task.machine.memory.split(addr, nbytes)
    if len(parts) > 1:
        raise OutOfBounds("a TMA box reaches over more than one buffer")
    return parts, region


class tma:  # noqa: N801 (stands for the module of that name)
    """`gluon.language.nvidia.hopper.tma`."""

    tensor_descriptor = Descriptor

    @staticmethod
    def async_load(
        tensor_desc: Descriptor,
        coord: Sequence,
        barrier: SharedMemory,
        result: SharedMemory,
        pred: object = True,
        multicast: object = False,
        cache_policy: object = None,
    ) -> None:
        if not _on(pred):
            return
        task, b, place = getcurrent(), _barrier(barrier), where()
        b.require()
        clock, desc = task.clock, tensor_desc
        parts, region = _parts(task, desc, coord, result)
        event = clock.async_event(place, COPIES)
        for runs, _ in parts:
            check_read(clock, runs, event, ASYNC)
        check_shared_write(clock, result, IN_FLIGHT, "TMA overwrites")
        b.in_flight += 1
        task.cta.copies += 1
        task.machine.events["tma_loads"] += 1
        cost = task.machine.cost
        landing = 0.0 if cost is None else cost.tma(task, result.data.nbytes)

        def finish() -> None:
            if parts and all(
                s.stop - s.start == n for s, n in zip(region, result.shape, strict=True)
            ):
                result.data[...] = (
                    load_raw(parts[0][0], desc.dtype).reshape(result.shape).view(result.data.dtype)
                )
            else:
                result.data[...] = 0
                if parts:
                    target = result.data[region]
                    target[...] = (
                        load_raw(parts[0][0], desc.dtype)
                        .reshape(target.shape)
                        .view(result.data.dtype)
                    )
            result.write[...] = event
            task.cta.copies -= 1
            b.land(result.data.nbytes, clock.completion(event, landing))
            task.machine.effects += 1

        task.machine.pending.append(Copy(task, place, finish, landing))
        task.effect()

    async_copy_global_to_shared = async_load

    @staticmethod
    def async_store(
        tensor_desc: Descriptor, coord: Sequence, src: SharedMemory, cache_policy: object = None
    ) -> None:
        task, place, desc = getcurrent(), where(), tensor_desc
        clock = task.clock
        parts, region = _parts(task, desc, coord, src)
        read = clock.async_event(place, STORE_READS)
        write = clock.async_event(place, COPIES)
        check_shared_read(clock, src, read, True)
        for runs, _ in parts:
            check_write(clock, runs, write, ASYNC)

        cost = task.machine.cost
        landing = 0.0 if cost is None else cost.tma(task, src.data.nbytes)

        def finish() -> None:
            for runs, _ in parts:
                raw = np.ascontiguousarray(src.data[region]).view(desc.dtype.store)
                store_raw(runs, desc.dtype, raw)
                notify_runs(runs)
            task.machine.effects += 1
            copy.done = True
            if task.waiting is not None and task.stores and task.stores[0][0].done:
                task.wake()

        copy = Copy(task, place, finish, landing)
        task.stores.append((copy, read, write))
        task.machine.events["tma_stores"] += 1
        task.machine.pending.append(copy)
        task.effect()

    async_copy_shared_to_global = async_store

    @staticmethod
    def store_wait(pendings: object, read_only: object = False) -> None:
        """Wait until at most `pendings` stores are outstanding; `read_only`: only until they have
        read their source.
        """
        task, keep = getcurrent(), int(as_tensor(pendings).v)
        task.pause()
        while len(task.stores) > keep:
            copy, read, write = task.stores[0]
            while not copy.done:
                task.block(lambda: f"waits for {len(task.stores)} TMA stores")
            task.stores.pop(0)
            task.clock.ns = max(task.clock.ns, copy.ns)
            task.clock.learn_async(read)
            if not read_only:
                task.clock.learn_async(write)
        task.effect()

    @staticmethod
    def make_tensor_descriptor(
        base: Pointer,
        shape: Sequence,
        strides: Sequence,
        block_shape: Sequence,
        layout: object = None,
        padding_option: str = "zero",
    ) -> Descriptor:
        ints = [[int(as_tensor(n).v) for n in seq] for seq in (shape, block_shape, strides)]
        return Descriptor(base.base, ints[0], base.dtype.element_ty, ints[1], ints[2])
