"""warpgroup_mma and its operands."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from greenlet import getcurrent

from . import dtypes as dt
from .dtypes import DType
from .errors import AsyncFault, KernelError
from .faults import where
from .mma import STEP_BYTES, multiply_accumulate
from .order import MMAS
from .shared import SharedMemory, check_shared_read
from .values import ANY_LAYOUT, EARLY_USE, Tensor


def fence_async_shared(cluster: bool = False) -> None:
    """Ordinary writes to shared memory before it are visible to TMA and WGMMA after it."""
    getcurrent().clock.proxy_fence(in_global=False, in_shared=True)


class MmaResult:
    """The accumulator of an asynchronous warpgroup_mma: unusable until warpgroup_mma_wait returns
    it.
    """

    pending_mma = True

    def __init__(self, op: Mma):
        self._op = op

    @property
    def type(self) -> MmaResult:
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self._op.shape

    @property
    def dtype(self) -> DType:
        return dt.float32

    @property
    def layout(self) -> object:
        return ANY_LAYOUT

    def __getattr__(self, name: str) -> object:
        raise AsyncFault(
            f"the result of an asynchronous warpgroup_mma is used (.{name}) before its wait"
        )


def _unusable(self: MmaResult, *_: object) -> None:
    raise AsyncFault(EARLY_USE)


for _name in (
    "add",
    "radd",
    "sub",
    "rsub",
    "mul",
    "rmul",
    "truediv",
    "rtruediv",
    "neg",
    "lt",
    "le",
    "gt",
    "ge",
    "eq",
    "ne",
    "bool",
    "getitem",
    "and",
    "or",
):
    setattr(MmaResult, f"__{_name}__", _unusable)
MmaResult.__hash__ = object.__hash__


class Mma:
    """One warpgroup_mma: operands until it is executed, then `value`."""

    def __init__(self, a: object, b: SharedMemory, acc: object, event: int):
        self.a, self.b, self.acc, self.event = a, b, acc, event
        self.shape = (a.shape[0], b.shape[1])
        self.ns = 0.0  # when it is done, in simulated time
        self.value: np.ndarray | None = None

    def execute(self) -> None:
        dtype = self.b.dtype
        a = self.a.data if isinstance(self.a, SharedMemory) else dt.encode(self.a.v, dtype)
        acc = self.acc
        if isinstance(acc, MmaResult):
            acc = acc._op.value
        elif acc is not None:
            acc = acc.v
        self.value = multiply_accumulate(a, self.b.data, acc, dtype)
        self.a = self.b = self.acc = None


def _check_operands(a: object, b: SharedMemory, acc: object) -> None:
    if not isinstance(b, SharedMemory):
        raise KernelError("warpgroup_mma: b must be in shared memory")
    if not isinstance(a, (SharedMemory, Tensor)):
        raise KernelError(
            f"warpgroup_mma: a must be a tensor or in shared memory, not {type(a).__name__}"
        )
    if a.dtype is not b.dtype or b.dtype not in (dt.float8e4nv, dt.bfloat16, dt.float16):
        raise KernelError(
            f"warpgroup_mma of {a.dtype} and {b.dtype}: both must be one of fp8e4nv, bf16, fp16"
        )
    m, k, n = a.shape[0], a.shape[1], b.shape[1]
    if b.shape[0] != k or tuple(acc.shape) != (m, n):
        raise KernelError(
            f"warpgroup_mma of {list(a.shape)} and {list(b.shape)} into {list(acc.shape)}"
        )
    if k * a.dtype.itemsize % STEP_BYTES or m % 64 or n % 8:
        raise KernelError(
            f"warpgroup_mma: M = {m} must be a multiple of 64, N = {n} of 8, K = {k} of "
            f"{STEP_BYTES // a.dtype.itemsize}"
        )
    if acc.dtype is not dt.float32:
        raise KernelError(f"warpgroup_mma: the accumulator must be float32, not {acc.dtype}")


def warpgroup_mma(
    a: object,
    b: SharedMemory,
    acc: object,
    *,
    use_acc: object = True,
    precision: object = None,
    max_num_imprecise_acc: object = None,
    is_async: object = False,
) -> object:
    """`acc = a @ b + (acc if use_acc else 0)`; asynchronous, the operands are read when it
    completes.
    """
    task = getcurrent()
    _check_operands(a, b, acc)
    clock = task.clock
    event = clock.async_event(where(), MMAS)
    for operand in (a, b):
        if isinstance(operand, SharedMemory):
            check_shared_read(clock, operand, event, True)
    op = Mma(a, b, acc if bool(use_acc) else None, event)
    if task.machine.cost is not None:
        op.ns = task.machine.cost.mma(task, (*op.shape, b.shape[0]), b.dtype.itemsize)
    task.mmas.append(op)
    task.machine.events["mmas"] += 1
    if is_async:
        return MmaResult(op)
    return warpgroup_mma_wait(0, [MmaResult(op)])


def warpgroup_mma_wait(num_outstanding: object = 0, deps: Sequence | None = None) -> object:
    """Complete all but the newest `num_outstanding`; returns `deps`, as tensors where they are
    complete.
    """
    if deps is None:
        raise KernelError("warpgroup_mma_wait needs deps")
    task, keep = getcurrent(), int(num_outstanding)
    while len(task.mmas) > keep:
        op = task.mmas.pop(0)
        op.execute()
        task.clock.ns = max(task.clock.ns, op.ns)
        task.clock.learn_async(op.event)
    out = []
    for dep in deps:
        if isinstance(dep, MmaResult) and dep._op.value is not None:
            dep = Tensor(dep._op.value, dt.float32)
        out.append(dep)
    return out[0] if len(out) == 1 else tuple(out)


def warpgroup_mma_init(value: Tensor) -> Tensor:
    """A first accumulator."""
    return value
