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
from .shared import SharedMemory as shared_memory_descriptor  # noqa: F401, N813
from .shared import allocate as allocate_shared_memory  # noqa: F401
from .tasks import warp_specialize  # noqa: F401
from .values import (
    Layout,
    LazySum,
    Pointer,
    Scalar,
    Tensor,
    as_tensor,
    coerce,
    shape_of,
    unary,
    wrap,
)
from .values import cast as _cast

tensor = Tensor
dtype = DType
tuple = builtins.tuple


def constexpr(value: object) -> object:
    """Inside a kernel a constant is simply its value."""
    return getattr(value, "value", value) if type(value).__name__ == "constexpr" else value


def _int(x: object) -> int:
    return x if type(x) is int else int(as_tensor(x).v)


# --- layouts: inert --------------------------------------------------------------------------------------------------

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


# --- the program -----------------------------------------------------------------------------------------------------

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


# --- making tensors --------------------------------------------------------------------------------------------------

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
    return Tensor(np.full(shape, scalar.v, dtype.calc), dtype, *(scalar.bounds() if dtype.kind in "iu" else ()))


def zeros(shape: Sequence, dtype: DType, layout: object = None) -> Tensor:
    dtype, shape = dt.as_dtype(dtype), shape_of([shape])
    if not shape:
        return full(shape, 0, dtype)
    return Tensor(np.zeros(shape, dtype.calc), dtype, *((0, 0) if dtype.kind in "iu" else ()))


def full_like(input: Tensor, value: object, shape: Sequence | None = None, dtype: DType | None = None,
              layout: object = None) -> Tensor:
    return full(input.shape if shape is None else shape, value, input.dtype if dtype is None else dtype)


def zeros_like(input: Tensor, shape: Sequence | None = None, dtype: DType | None = None,
               layout: object = None) -> Tensor:
    return full_like(input, 0, shape, dtype)


def to_tensor(x: object) -> Tensor:
    return as_tensor(x)


# --- memory ----------------------------------------------------------------------------------------------------------

def load(pointer: Pointer, mask: object = None, other: object = None, boundary_check: tuple = (),
         padding_option: str = "", cache_modifier: str = "", eviction_policy: str = "", volatile: bool = False,
         **_: object) -> Tensor:
    return _load(getcurrent(), pointer, mask, other)


def store(pointer: Pointer, value: object, mask: object = None, boundary_check: tuple = (), cache_modifier: str = "",
          eviction_policy: str = "", **_: object) -> None:
    _store(getcurrent(), pointer, value, mask)


def _atomic(update: str) -> Callable[..., Tensor]:
    def run(pointer: Pointer, val: object, mask: object = None, sem: str | None = None,
            scope: str | None = None) -> Tensor:
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


def atomic_cas(pointer: Pointer, cmp: object, val: object, sem: str | None = None, scope: str | None = None) -> Tensor:
    return atomic(getcurrent(), pointer, val, None, "cas", sem or "acq_rel", scope or "gpu", cmp)


def atomic_load(pointer: Pointer, mask: object = None, sem: str | None = None, scope: str | None = None) -> Tensor:
    return load_atomic(getcurrent(), pointer, mask, sem or "acquire", scope or "gpu")


def atomic_store(pointer: Pointer, val: object, mask: object = None, sem: str | None = None,
                 scope: str | None = None) -> None:
    store_atomic(getcurrent(), pointer, val, mask, sem or "release", scope or "gpu")


# --- elementwise -----------------------------------------------------------------------------------------------------

def where(condition: object, x: object, y: object) -> Tensor:
    condition = as_tensor(condition)
    if type(x) is Pointer or type(y) is Pointer:
        return wrap(np.where(condition.v, x.v, y.v), x.dtype)
    av, bv, dtype = (x.v, y.v, x.dtype) if isinstance(x, Tensor) and isinstance(y, Tensor) and x.dtype is y.dtype \
        else coerce(x, y)
    if type(condition) is Scalar and type(av) is not np.ndarray and type(bv) is not np.ndarray:
        return wrap(av if condition.v else bv, dtype)
    out = np.where(condition.v, av, bv)
    return wrap(out if out.dtype == dtype.calc else out.astype(dtype.calc), dtype)


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
    wide = np.asarray(a).astype(unsigned).astype(np.uint64) * np.asarray(b).astype(unsigned).astype(np.uint64)
    return wrap((wide >> np.uint64(32)).astype(np.uint32).astype(dtype.calc), dtype)


# --- shape -----------------------------------------------------------------------------------------------------------

def cast(input: object, dtype: DType, fp_downcast_rounding: object = None, bitcast: bool = False) -> Tensor:
    return _cast(as_tensor(input), dt.as_dtype(dtype), bool(bitcast))


def convert_layout(value: Tensor, layout: object, assert_trivial: bool = False) -> Tensor:
    return value


def set_auto_layout(value: Tensor, layout: object) -> Tensor:
    return value


def expand_dims(input: Tensor, axis: int) -> Tensor:
    return as_tensor(input).expand_dims(_int(axis))


def reshape(input: Tensor, *shape: object, can_reorder: bool = False) -> Tensor:
    return input.reshape(*shape)


def ravel(x: Tensor) -> Tensor:
    return x.reshape(x.numel)


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


# --- reductions ------------------------------------------------------------------------------------------------------

def _tree(op: Callable, x: np.ndarray, axis: int) -> np.ndarray:
    """Reduce by halves: the result does not depend on the other dimensions or on how the array lies in memory."""
    x = np.moveaxis(x, axis, 0)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = op(x[:half], x[half:2 * half]) if x.shape[0] % 2 == 0 else np.concatenate(
            [op(x[:half], x[half:2 * half]), x[2 * half:]])
    return x[0]


def _widened(x: Tensor) -> Tensor:
    """Small integers reduce as 32 bits, bfloat16 as fp32."""
    if x.dtype.is_integer and x.dtype.bits < 32:
        return _cast(x, uint32 if x.dtype.kind == "u" else int32, False)
    return _cast(x, float32, False) if x.dtype is bfloat16 else x


def _reduce(x: Tensor, axis: object, keep_dims: object, op: Callable, exact: Callable | None) -> Tensor:
    x = as_tensor(x)
    v = np.asarray(x.v)
    if axis is None:
        v, axis = v.reshape(-1), 0
        keep_shape = (1,) * len(x.shape)
    else:
        axis = _int(axis)
        keep_shape = v.shape[:axis] + (1,) + v.shape[axis + 1:] if axis >= 0 else None
    if not x.shape:
        return x
    out = exact(v, axis) if exact is not None and x.dtype.is_integer else _tree(op, v, axis)
    out = np.asarray(out, x.dtype.calc)
    return wrap(out.reshape(keep_shape) if keep_dims else out, x.dtype)


def _exact_sum(v: np.ndarray, axis: int) -> np.ndarray:
    out = np.sum(v, axis=axis, dtype=np.int64 if v.dtype.kind == "i" else np.uint64)
    info = np.iinfo(v.dtype)
    if v.dtype.itemsize < 8 and v.dtype.kind == "i" and (np.any(out > info.max) or np.any(out < info.min)):
        from .errors import Overflow

        raise Overflow(f"{v.dtype} overflow in sum")
    return out.astype(v.dtype)


def sum(input: Tensor, axis: object = None, keep_dims: bool = False, dtype: DType | None = None) -> Tensor:
    x = as_tensor(input) if dtype is not None else _widened(as_tensor(input))
    x = x if dtype is None else _cast(x, dt.as_dtype(dtype), False)
    return _reduce(x, axis, keep_dims, np.add, _exact_sum)


def max(input: Tensor, axis: object = None, return_indices: bool = False, return_indices_tie_break_left: bool = True,
        keep_dims: bool = False) -> object:
    return _pick(np.fmax, np.max, np.argmax, input, axis, return_indices, keep_dims)


def min(input: Tensor, axis: object = None, return_indices: bool = False, return_indices_tie_break_left: bool = True,
        keep_dims: bool = False) -> object:
    return _pick(np.fmin, np.min, np.argmin, input, axis, return_indices, keep_dims)


def _pick(op: np.ufunc, exact: Callable, where_: Callable, x: Tensor, axis: object, indices: bool,
          keep_dims: bool) -> object:
    x = _widened(as_tensor(x))
    out = _reduce(x, axis, keep_dims, op, lambda v, a: exact(v, axis=a))
    if not indices:
        return out
    at = where_(x.v, axis=_int(axis), keepdims=bool(keep_dims))
    return out, wrap(np.asarray(at, np.int32), int32)


def xor_sum(input: Tensor, axis: object = None, keep_dims: bool = False) -> Tensor:
    return _reduce(as_tensor(input), axis, keep_dims, np.bitwise_xor, lambda v, a: np.bitwise_xor.reduce(v, axis=a))


def reduce_or(input: Tensor, axis: object, keep_dims: bool = False) -> Tensor:
    return _reduce(as_tensor(input), axis, keep_dims, np.bitwise_or, lambda v, a: np.bitwise_or.reduce(v, axis=a))


def _tensors(input: object) -> tuple:
    return builtins.tuple(input) if isinstance(input, (list, builtins.tuple)) else (input,)


def _apply(combine: Callable, a: Sequence, b: Sequence) -> tuple:
    out = combine(*a, *b)
    return builtins.tuple(as_tensor(x) for x in _tensors(out))


def reduce(input: object, axis: object, combine_fn: Callable, keep_dims: bool = False) -> object:
    """Reduce one tensor, or a tuple of them, with a JIT function."""
    parts = _tensors(input)
    if axis is None:
        parts, axis = [ravel(p) for p in parts], 0
    axis = _int(axis)
    rows = [np.moveaxis(np.asarray(p.v), axis, 0) for p in parts]
    kinds = [p.dtype for p in parts]
    while rows[0].shape[0] > 1:
        half = rows[0].shape[0] // 2
        a = [wrap(r[:half], d) for r, d in zip(rows, kinds, strict=True)]
        b = [wrap(r[half:], d) for r, d in zip(rows, kinds, strict=True)]
        rows = [_cast(t, d, False).v for t, d in zip(_apply(combine_fn, a, b), kinds, strict=True)]
    out = [r[0] for r in rows]
    if keep_dims:
        out = [np.expand_dims(r, axis) for r in out]
    result = builtins.tuple(wrap(r, d) for r, d in zip(out, kinds, strict=True))
    return result if isinstance(input, (list, builtins.tuple)) else result[0]


_PLAIN_SUM = (lambda a, b: a + b).__code__.co_code


def associative_scan(input: object, axis: object, combine_fn: Callable, reverse: bool = False) -> object:
    """Inclusive scan with an associative JIT function."""
    parts, axis = _tensors(input), _int(axis)
    rows = [np.moveaxis(np.asarray(p.v), axis, 0) for p in parts]
    if reverse:
        rows = [r[::-1] for r in rows]
    kinds = [p.dtype for p in parts]
    code = getattr(combine_fn, "__code__", None)
    if len(parts) == 1 and kinds[0] in (int32, int64) and code is not None and code.co_code == _PLAIN_SUM:
        total = np.cumsum(rows[0], axis=0, dtype=np.int64)
        if kinds[0].lo <= int(total.min()) and int(total.max()) <= kinds[0].hi:
            rows = [total.astype(kinds[0].calc)]
            return _scanned(rows, kinds, axis, reverse, input)
    step, n = 1, rows[0].shape[0]
    while step < n:
        a = [wrap(r[:-step], d) for r, d in zip(rows, kinds, strict=True)]
        b = [wrap(r[step:], d) for r, d in zip(rows, kinds, strict=True)]
        new = [np.asarray(_cast(t, d, False).v) for t, d in zip(_apply(combine_fn, a, b), kinds, strict=True)]
        rows = [np.concatenate([r[:step], x]) for r, x in zip(rows, new, strict=True)]
        step *= 2
    return _scanned(rows, kinds, axis, reverse, input)


def _scanned(rows: list, kinds: list, axis: int, reverse: bool, input: object) -> object:
    if reverse:
        rows = [r[::-1] for r in rows]
    out = builtins.tuple(wrap(np.moveaxis(r, 0, axis), d) for r, d in zip(rows, kinds, strict=True))
    return out if isinstance(input, (list, builtins.tuple)) else out[0]


def cumsum(input: Tensor, axis: int = 0, reverse: bool = False) -> Tensor:
    return associative_scan(_widened(input), axis, lambda a, b: a + b, reverse)


def histogram(input: Tensor, num_bins: int, mask: Tensor | None = None, layout: object = None) -> Tensor:
    values = np.asarray(input.v)
    if mask is not None:
        values = values[np.broadcast_to(mask.v, values.shape)]
    bins = _int(num_bins)
    if values.size and (values.min() < 0 or values.max() >= bins):
        raise DeviceAssert(f"histogram: values from {values.min()} to {values.max()}, the bins are 0 to {bins - 1}")
    return Tensor(np.bincount(values.astype(np.int64), minlength=bins).astype(np.int32), int32)


def gather(src: Tensor, index: Tensor, axis: int) -> Tensor:
    axis = _int(axis)
    index_v = np.asarray(index.v)
    if index_v.size and (index_v.min() < 0 or index_v.max() >= src.shape[axis]):
        raise DeviceAssert(f"gather: indices from {index_v.min()} to {index_v.max()}, dimension {axis} has "
                           f"{src.shape[axis]}")
    return Tensor(np.take_along_axis(np.asarray(src.v), index_v.astype(np.int64), axis), src.dtype)


# --- compile time ----------------------------------------------------------------------------------------------------

def static_range(*args: object, **_: object) -> Iterator[int]:
    return iter(builtins.range(*[_int(a) for a in args]))


def static_assert(cond: object, msg: str = "") -> None:
    if not bool(cond):
        raise DeviceAssert(f"gl.static_assert failed: {msg}")


def static_print(*values: object, sep: str = " ", end: str = "\n", file: object = None, flush: bool = False) -> None:
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


# --- methods of tensors that are functions of gl ---------------------------------------------------------------------

def _install(cls: type, functions: dict[str, Callable]) -> None:
    for name, function in functions.items():
        setattr(cls, name, function)


_install(Tensor, {f.__name__: f for f in (
    load, store, atomic_add, atomic_max, atomic_min, atomic_and, atomic_or, atomic_xor, atomic_xchg, atomic_cas,
    sum, max, min, reduce, associative_scan, histogram, gather, abs, xor_sum)})
_ = LazySum
