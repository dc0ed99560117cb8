"""`gluon.language` (`gl`) for kernels that run under the interpreter."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from greenlet import getcurrent

from . import dtypes as dt
from .access import atomic, load_atomic, store_atomic
from .access import load as _load
from .access import store as _store
from .arith import cast as _cast
from .arith import coerce, unary
from .dtypes import (  # noqa: F401 (names of gl)
    DType,
    bfloat16,
    float8e4nv,
    float16,
    float32,
    float64,
    int1,
    int8,
    int16,
    int32,
    int64,
    pointer_type,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .errors import DeviceAssert, UnknownName, UnsupportedOperation
from .ptx import inline_asm_elementwise  # noqa: F401
from .reductions import (  # noqa: F401 (names of gl)
    associative_scan,
    cumsum,
    gather,
    histogram,
    max,
    min,
    ravel,
    reduce,
    reduce_or,
    sum,
    xor_sum,
)
from .shared import SharedMemory as shared_memory_descriptor  # noqa: F401, N813
from .shared import allocate as allocate_shared_memory  # noqa: F401
from .tasks import warp_specialize  # noqa: F401
from .values import (
    Layout,
    Pointer,
    Scalar,
    Tensor,
    as_tensor,
    shape_of,
    wrap,
)

tensor = Tensor
dtype = DType
tuple = builtins.tuple


def constexpr(value: object) -> object:
    """Inside a kernel a constant is simply its value."""
    return getattr(value, "value", value) if type(value).__name__ == "constexpr" else value


def _int(x: object) -> int:
    return x if type(x) is int else int(as_tensor(x).v)


# --- layouts: inert -------------------------------------------------------------------------------


def _layout(kind: str) -> Callable[..., Layout]:
    def make(*args: object, **kwargs: object) -> Layout:
        return Layout(kind, args, kwargs)

    make.__name__ = kind
    make.get_default_for = lambda *args, **kwargs: Layout(kind, args, kwargs)
    return make


AutoLayout = _layout("AutoLayout")
BlockedLayout = _layout("BlockedLayout")
CoalescedLayout = _layout("CoalescedLayout")
DistributedLinearLayout = _layout("DistributedLinearLayout")
DotOperandLayout = _layout("DotOperandLayout")
NVMMADistributedLayout = _layout("NVMMADistributedLayout")
NVMMASharedLayout = _layout("NVMMASharedLayout")
PaddedSharedLayout = _layout("PaddedSharedLayout")
SharedLinearLayout = _layout("SharedLinearLayout")
SliceLayout = _layout("SliceLayout")
SwizzledSharedLayout = _layout("SwizzledSharedLayout")


# --- the program ----------------------------------------------------------------------------------


def program_id(axis: int) -> Tensor:
    return Scalar(getcurrent().program if _int(axis) == 0 else 0, int32)


def num_programs(axis: int) -> Tensor:
    return Scalar(getcurrent().launch.grid if _int(axis) == 0 else 1, int32)


def num_warps() -> int:
    return getcurrent().warps


def num_ctas() -> int:
    return 1


def thread_barrier() -> None:
    """A barrier of the partition's warps."""
    task = getcurrent()
    task.clock.barrier()
    task.pause()


def barrier(*, cluster: bool = False) -> None:
    thread_barrier()


# --- making tensors -------------------------------------------------------------------------------


def arange(start: int, end: int, layout: object = None) -> Tensor:
    start, end = _int(start), _int(end)
    if end <= start or (end - start) & (end - start - 1):
        raise ValueError(f"arange({start}, {end}): the length must be a power of two")
    return Tensor(np.arange(start, end, dtype=np.int32), int32, start, end - 1)


def full(shape: Sequence, value: object, dtype: DType, layout: object = None) -> Tensor:
    dtype, shape = dt.as_dtype(dtype), shape_of([shape])
    scalar = _cast(as_tensor(value), dtype, False)
    if not shape:
        return scalar
    return Tensor(
        np.full(shape, scalar.v, dtype.calc),
        dtype,
        *(scalar.bounds() if dtype.kind in "iu" else ()),
    )


def zeros(shape: Sequence, dtype: DType, layout: object = None) -> Tensor:
    dtype, shape = dt.as_dtype(dtype), shape_of([shape])
    if not shape:
        return full(shape, 0, dtype)
    return Tensor(np.zeros(shape, dtype.calc), dtype, *((0, 0) if dtype.kind in "iu" else ()))


def full_like(
    input: Tensor,
    value: object,
    shape: Sequence | None = None,
    dtype: DType | None = None,
    layout: object = None,
) -> Tensor:
    return full(
        input.shape if shape is None else shape, value, input.dtype if dtype is None else dtype
    )


def zeros_like(
    input: Tensor, shape: Sequence | None = None, dtype: DType | None = None, layout: object = None
) -> Tensor:
    return full_like(input, 0, shape, dtype)


def to_tensor(x: object) -> Tensor:
    return as_tensor(x)


# --- memory ---------------------------------------------------------------------------------------


def load(
    pointer: Pointer,
    mask: object = None,
    other: object = None,
    boundary_check: tuple = (),
    padding_option: str = "",
    cache_modifier: str = "",
    eviction_policy: str = "",
    volatile: bool = False,
    **_: object,
) -> Tensor:
    return _load(getcurrent(), pointer, mask, other)


def store(
    pointer: Pointer,
    value: object,
    mask: object = None,
    boundary_check: tuple = (),
    cache_modifier: str = "",
    eviction_policy: str = "",
    **_: object,
) -> None:
    _store(getcurrent(), pointer, value, mask)


def _atomic(update: str) -> Callable[..., Tensor]:
    def run(
        pointer: Pointer,
        val: object,
        mask: object = None,
        sem: str | None = None,
        scope: str | None = None,
    ) -> Tensor:
        return atomic(getcurrent(), pointer, val, mask, update, sem or "acq_rel", scope or "gpu")

    run.__name__ = f"atomic_{update}"
    return run


atomic_add = _atomic("add")
atomic_max = _atomic("max")
atomic_min = _atomic("min")
atomic_and = _atomic("and")
atomic_or = _atomic("or")
atomic_xor = _atomic("xor")
atomic_xchg = _atomic("xchg")


def atomic_cas(
    pointer: Pointer, cmp: object, val: object, sem: str | None = None, scope: str | None = None
) -> Tensor:
    return atomic(getcurrent(), pointer, val, None, "cas", sem or "acq_rel", scope or "gpu", cmp)


def atomic_load(
    pointer: Pointer, mask: object = None, sem: str | None = None, scope: str | None = None
) -> Tensor:
    return load_atomic(getcurrent(), pointer, mask, sem or "acquire", scope or "gpu")


def atomic_store(
    pointer: Pointer,
    val: object,
    mask: object = None,
    sem: str | None = None,
    scope: str | None = None,
) -> None:
    store_atomic(getcurrent(), pointer, val, mask, sem or "release", scope or "gpu")


# --- elementwise ----------------------------------------------------------------------------------


def where(condition: object, x: object, y: object) -> Tensor:
    condition = as_tensor(condition)
    if type(condition) is Scalar and type(x) is Scalar and type(y) is Scalar and x.dtype is y.dtype:
        return x if condition.v else y
    if type(x) is Pointer or type(y) is Pointer:
        return wrap(np.where(condition.v, x.v, y.v), x.dtype)
    av, bv, dtype = (
        (x.v, y.v, x.dtype)
        if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype is y.dtype
        else coerce(x, y)
    )
    if type(condition) is Scalar and type(av) is not np.ndarray and type(bv) is not np.ndarray:
        return wrap(av if condition.v else bv, dtype)
    out = np.where(condition.v, av, bv)
    if out.dtype != dtype.calc:
        out = out.astype(dtype.calc)
    return Tensor(out, dtype, *_hull(x, y)) if dtype.kind in "iu" else wrap(out, dtype)


def _hull(x: object, y: object) -> tuple[int | None, int | None]:
    """Bounds of a choice between two integers, where both are known."""
    if isinstance(x, int):
        lo, hi = x, x
    else:
        lo, hi = x.bounds() if type(x) is Scalar else (x.lo, x.hi)
    if isinstance(y, int):
        lo2, hi2 = y, y
    else:
        lo2, hi2 = y.bounds() if type(y) is Scalar else (y.lo, y.hi)
    if lo is None or lo2 is None:
        return None, None
    return builtins.min(lo, lo2), builtins.max(hi, hi2)


def _extremum(op: np.ufunc, ignoring_nan: np.ufunc, choose: Callable) -> Callable[..., Tensor]:
    def run(x: object, y: object, propagate_nan: object = None) -> Tensor:
        if not isinstance(x, Tensor) and not isinstance(y, Tensor):
            return choose(x, y)
        av, bv, dtype = coerce(x, y)
        if type(av) is int and type(bv) is int:
            return Scalar(choose(av, bv), dtype)
        keep_nan = propagate_nan is not None and "ALL" in str(propagate_nan)
        return wrap((op if keep_nan or dtype.kind != "f" else ignoring_nan)(av, bv), dtype)

    return run


maximum = _extremum(np.maximum, np.fmax, builtins.max)
minimum = _extremum(np.minimum, np.fmin, builtins.min)


def clamp(x: object, min: object, max: object, propagate_nan: object = None) -> Tensor:
    return minimum(maximum(x, min, propagate_nan), max, propagate_nan)


def abs(x: object) -> Tensor:
    x = as_tensor(x)
    return wrap(np.abs(x.v), x.dtype)


def _function(op: Callable) -> Callable[[object], Tensor]:
    return lambda x: unary(op, x)


exp = _function(np.exp)
exp2 = _function(np.exp2)
log = _function(np.log)
log2 = _function(np.log2)
sqrt = _function(np.sqrt)
sqrt_rn = sqrt
floor = _function(np.floor)
ceil = _function(np.ceil)
sin = _function(np.sin)
cos = _function(np.cos)


def _reciprocal_root(x: np.ndarray) -> np.ndarray:
    return (1.0 / np.sqrt(np.asarray(x, np.float64))).astype(np.asarray(x).dtype)


rsqrt = _function(_reciprocal_root)


def fma(x: object, y: object, z: object) -> Tensor:
    """x * y + z, rounded once (the product is exact in float64)."""
    x, y, z = as_tensor(x), as_tensor(y), as_tensor(z)
    out = np.asarray(x.v, np.float64) * np.asarray(y.v, np.float64) + np.asarray(z.v, np.float64)
    return wrap(dt.convert(out.astype(np.float32), float32, x.dtype), x.dtype)


def fdiv(x: object, y: object, ieee_rounding: bool = False) -> Tensor:
    return as_tensor(x) / y


div_rn = fdiv


def cdiv(x: object, div: object) -> object:
    if not isinstance(x, Tensor) and not isinstance(div, Tensor):
        return -(-x // div)
    return (x + (div - 1)) // div


def add(x: object, y: object, sanitize_overflow: bool = True) -> Tensor:
    return as_tensor(x) + y


def sub(x: object, y: object, sanitize_overflow: bool = True) -> Tensor:
    return as_tensor(x) - y


def mul(x: object, y: object, sanitize_overflow: bool = True) -> Tensor:
    return as_tensor(x) * y


def umulhi(x: object, y: object) -> Tensor:
    a, b, dtype = coerce(x, y)
    unsigned = {"int32": np.uint32, "uint32": np.uint32}.get(dtype.name)
    if unsigned is None:
        raise UnsupportedOperation(f"umulhi of {dtype}")
    wide = np.asarray(a).astype(unsigned).astype(np.uint64) * np.asarray(b).astype(unsigned).astype(
        np.uint64
    )
    return wrap((wide >> np.uint64(32)).astype(np.uint32).astype(dtype.calc), dtype)


# --- shape ----------------------------------------------------------------------------------------


def cast(
    input: object, dtype: DType, fp_downcast_rounding: object = None, bitcast: bool = False
) -> Tensor:
    return _cast(as_tensor(input), dt.as_dtype(dtype), bool(bitcast))


def convert_layout(value: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
    return value


def set_auto_layout(value: Tensor, layout: object) -> Tensor:
    return value


def expand_dims(input: Tensor, axis: int) -> Tensor:
    return as_tensor(input).expand_dims(_int(axis))


def reshape(input: Tensor, *shape: object, can_reorder: bool = False) -> Tensor:
    return input.reshape(*shape)


def permute(input: Tensor, *dims: object) -> Tensor:
    return input.permute(*dims)


def split(a: Tensor) -> tuple:
    return a.split()


def join(a: Tensor, b: Tensor) -> Tensor:
    return as_tensor(a).join(b)


def broadcast(input: Tensor, other: Tensor) -> tuple:
    shape = np.broadcast_shapes(input.shape, other.shape)
    return input.broadcast_to(shape), other.broadcast_to(shape)


def _same(x: object, *_: object, **__: object) -> object:
    return x


multiple_of = max_contiguous = max_constancy = _same


def assume(cond: object) -> None:
    if not bool(cond):
        raise DeviceAssert("gl.assume of something that does not hold")


# --- compile time ---------------------------------------------------------------------------------


def static_range(*args: object, **_: object) -> Iterator[int]:
    return iter(builtins.range(*[_int(a) for a in args]))


def static_assert(cond: object, msg: str = "") -> None:
    if not bool(cond):
        raise DeviceAssert(f"gl.static_assert failed: {msg}")


def static_print(
    *values: object, sep: str = " ", end: str = "\n", file: object = None, flush: bool = False
) -> None:
    print(*values, sep=sep, end=end, flush=flush)


def device_assert(cond: object, msg: str = "", mask: object = None) -> None:
    cond = as_tensor(cond)
    if mask is not None:
        cond = cond | ~as_tensor(mask)
    if not np.all(cond.v):
        raise DeviceAssert(f"gl.device_assert failed: {msg}")


def device_print(prefix: str, *args: object, hex: bool = False) -> None:
    print(f"[{getcurrent().title}] {prefix}", *[getattr(a, "v", a) for a in args])


def __getattr__(name: str) -> object:
    if name.startswith("__"):
        raise AttributeError(name)
    raise UnknownName(f"gl.{name} is not known to the interpreter")


# --- methods of tensors that are functions of gl --------------------------------------------------


def _install(cls: type, functions: dict[str, Callable]) -> None:
    for name, function in functions.items():
        setattr(cls, name, function)


_install(
    Tensor,
    {
        f.__name__: f
        for f in (
            load,
            store,
            atomic_add,
            atomic_max,
            atomic_min,
            atomic_and,
            atomic_or,
            atomic_xor,
            atomic_xchg,
            atomic_cas,
            sum,
            max,
            min,
            reduce,
            associative_scan,
            histogram,
            gather,
            abs,
            xor_sum,
        )
    },
)
