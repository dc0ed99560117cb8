"""Values of a kernel: scalars, tensors, pointers, and Triton's arithmetic on them.

Values are immutable.  Integer tensors carry bounds, so that most additions need no overflow check, and a sum of a column
and a row stays a `LazySum` until somebody needs its elements: addresses of a tile are such sums, and memory accesses are
much faster on rows than on lanes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np

from . import dtypes as dt
from .dtypes import DType
from .errors import AsyncFault, Misaligned, OutOfBounds, Overflow


class Tensor:
    """A value: NumPy array `v` (of `dtype.calc`) and `dtype`; `lo`, `hi` bound integers when known."""

    __slots__ = ("dtype", "hi", "lo", "v")

    def __init__(self, v: object, dtype: DType, lo: int | None = None, hi: int | None = None):
        self.v, self.dtype, self.lo, self.hi = v, dtype, lo, hi

    @property
    def shape(self) -> tuple[int, ...]:
        return self.v.shape

    @property
    def type(self) -> ValueType:
        return ValueType(self)

    @property
    def layout(self) -> object:
        return ANY_LAYOUT

    @property
    def numel(self) -> int:
        return int(np.prod(self.shape))

    def __repr__(self) -> str:
        return f"Tensor({self.dtype}, {self.v})"

    def __len__(self) -> int:
        return self.shape[0]

    def __bool__(self) -> bool:
        if self.v.size != 1:
            raise TypeError("a tensor has no truth value; reduce it to a scalar first")
        return bool(self.v.reshape(-1)[0])

    def __index__(self) -> int:
        if self.dtype.kind not in "biu" or self.shape:
            raise TypeError(f"a {self.dtype} of shape {self.shape} is no index")
        return int(self.v)

    def __getitem__(self, key: object) -> Tensor:
        return self._same(self.v[check_key(key)])

    def _same(self, v: np.ndarray) -> Tensor:
        return Tensor(v, self.dtype, self.lo, self.hi)

    def bounds(self) -> tuple[int, int]:
        """Least and greatest integer that may occur."""
        if self.lo is None:
            if self.v.size == 0:
                return 0, 0
            self.lo, self.hi = int(self.v.min()), int(self.v.max())
        return self.lo, self.hi

    def to(self, dtype: DType, fp_downcast_rounding: object = None, bitcast: bool = False) -> Tensor:
        return cast(self, dt.as_dtype(dtype), bool(bitcast))

    def reshape(self, *shape: object) -> Tensor:
        new = shape_of(shape)
        if int(np.prod(new)) != self.numel:
            raise ValueError(f"cannot reshape {list(self.shape)} to {new}")
        return wrap(self.v.reshape(new), self.dtype, self.lo, self.hi)

    def permute(self, *dims: object) -> Tensor:
        return self._same(self.v.transpose(shape_of(dims)))

    trans = permute

    @property
    def T(self) -> Tensor:  # noqa: N802 (Triton's name)
        return self.permute(1, 0)

    def expand_dims(self, axis: int) -> Tensor:
        return self._same(np.expand_dims(self.v, axis))

    def broadcast_to(self, *shape: object) -> Tensor:
        return self._same(np.broadcast_to(self.v, shape_of(shape)))

    def split(self) -> tuple[Tensor, Tensor]:
        if not self.shape or self.shape[-1] != 2:
            raise ValueError(f"split needs a last dimension of 2, the shape is {list(self.shape)}")
        return tuple(wrap(self.v[..., i], self.dtype, self.lo, self.hi) for i in (0, 1))

    def join(self, other: Tensor) -> Tensor:
        a, b, dtype = coerce(self, other)
        a, b = np.broadcast_arrays(a, b)
        return Tensor(np.stack([a, b], axis=-1), dtype)

    def __add__(self, o: object) -> Tensor:
        return add(self, o)

    def __radd__(self, o: object) -> Tensor:
        return add(o, self)

    def __sub__(self, o: object) -> Tensor:
        return subtract(self, o)

    def __rsub__(self, o: object) -> Tensor:
        return subtract(o, self)

    def __mul__(self, o: object) -> Tensor:
        return multiply(self, o)

    def __rmul__(self, o: object) -> Tensor:
        return multiply(o, self)

    def __truediv__(self, o: object) -> Tensor:
        return divide(self, o)

    def __rtruediv__(self, o: object) -> Tensor:
        return divide(o, self)

    def __floordiv__(self, o: object) -> Tensor:
        return int_divide(self, o, False)

    def __rfloordiv__(self, o: object) -> Tensor:
        return int_divide(o, self, False)

    def __mod__(self, o: object) -> Tensor:
        return int_divide(self, o, True)

    def __rmod__(self, o: object) -> Tensor:
        return int_divide(o, self, True)

    def __and__(self, o: object) -> Tensor:
        return bitwise(np.bitwise_and, self, o)

    def __or__(self, o: object) -> Tensor:
        return bitwise(np.bitwise_or, self, o)

    def __xor__(self, o: object) -> Tensor:
        return bitwise(np.bitwise_xor, self, o)

    __rand__, __ror__, __rxor__ = __and__, __or__, __xor__

    def __lshift__(self, o: object) -> Tensor:
        return shift(self, o, True)

    def __rlshift__(self, o: object) -> Tensor:
        return shift(o, self, True)

    def __rshift__(self, o: object) -> Tensor:
        return shift(self, o, False)

    def __rrshift__(self, o: object) -> Tensor:
        return shift(o, self, False)

    def __lt__(self, o: object) -> Tensor:
        return compare(np.less, self, o)

    def __le__(self, o: object) -> Tensor:
        return compare(np.less_equal, self, o)

    def __gt__(self, o: object) -> Tensor:
        return compare(np.greater, self, o)

    def __ge__(self, o: object) -> Tensor:
        return compare(np.greater_equal, self, o)

    def __eq__(self, o: object) -> Tensor:
        return compare(np.equal, self, o)

    def __ne__(self, o: object) -> Tensor:
        return compare(np.not_equal, self, o)

    __hash__ = object.__hash__

    def __neg__(self) -> Tensor:
        if self.dtype.kind == "f":
            return wrap(-self.v, self.dtype)
        return subtract(0, self)

    def __pos__(self) -> Tensor:
        return self

    def __invert__(self) -> Tensor:
        if not self.dtype.is_integer:
            raise TypeError(f"~ needs integers, not {self.dtype}")
        if type(self.v) is bool:
            return wrap(not self.v, self.dtype)
        if type(self.v) is int and self.dtype.kind == "u":
            return Scalar(self.v ^ self.dtype.hi, self.dtype)
        return wrap(~self.v, self.dtype)


class Scalar(Tensor):
    """A tensor without dimensions: `v` is a Python int or bool, or a NumPy float."""

    __slots__ = ()

    @property
    def shape(self) -> tuple[int, ...]:
        return ()

    @property
    def numel(self) -> int:
        return 1

    def __bool__(self) -> bool:
        return bool(self.v)

    def __index__(self) -> int:
        if not self.dtype.is_integer:
            raise TypeError(f"a {self.dtype} is no index")
        return int(self.v)

    def __getitem__(self, key: object) -> Tensor:
        return self._same(np.asarray(self.v, self.dtype.calc)[check_key(key)])

    def bounds(self) -> tuple[int, int]:
        return self.v, self.v

    def _same(self, v: object) -> Tensor:
        return wrap(v, self.dtype)

    def reshape(self, *shape: object) -> Tensor:
        return wrap(np.asarray(self.v, self.dtype.calc).reshape(shape_of(shape)), self.dtype)

    def expand_dims(self, axis: int) -> Tensor:
        return self.reshape(1)

    def broadcast_to(self, *shape: object) -> Tensor:
        return Tensor(np.full(shape_of(shape), self.v, self.dtype.calc), self.dtype)

    # The loop counters of every role: worth a short path.
    def __add__(self, o: object) -> Tensor:
        d = self.dtype
        if type(o) is int or type(o) is Scalar and o.dtype is d:
            r = self.v + (o if type(o) is int else o.v)
            if d.kind == "i" and d.lo <= r <= d.hi:
                return Scalar(r, d)
        return add(self, o)

    __radd__ = __add__

    def __sub__(self, o: object) -> Tensor:
        d = self.dtype
        if type(o) is int or type(o) is Scalar and o.dtype is d:
            r = self.v - (o if type(o) is int else o.v)
            if d.kind == "i" and d.lo <= r <= d.hi:
                return Scalar(r, d)
        return subtract(self, o)

    def __mul__(self, o: object) -> Tensor:
        d = self.dtype
        if type(o) is int or type(o) is Scalar and o.dtype is d:
            r = self.v * (o if type(o) is int else o.v)
            if d.kind == "i" and d.lo <= r <= d.hi:
                return Scalar(r, d)
        return multiply(self, o)

    __rmul__ = __mul__

    def __floordiv__(self, o: object) -> Tensor:
        d = self.dtype
        if d.kind == "i" and (type(o) is int or type(o) is Scalar and o.dtype is d):
            b = o if type(o) is int else o.v
            if self.v >= 0 and b > 0:
                return Scalar(self.v // b, d)
        return int_divide(self, o, False)

    def __mod__(self, o: object) -> Tensor:
        d = self.dtype
        if d.kind == "i" and (type(o) is int or type(o) is Scalar and o.dtype is d):
            b = o if type(o) is int else o.v
            if self.v >= 0 and b > 0:
                return Scalar(self.v % b, d)
        return int_divide(self, o, True)

    def __lt__(self, o: object) -> Tensor:
        if type(o) is int or type(o) is Scalar and o.dtype is self.dtype:
            return Scalar(bool(self.v < (o if type(o) is int else o.v)), dt.int1)
        return compare(np.less, self, o)

    def __eq__(self, o: object) -> Tensor:
        if type(o) is int or type(o) is Scalar and o.dtype is self.dtype:
            return Scalar(bool(self.v == (o if type(o) is int else o.v)), dt.int1)
        return compare(np.equal, self, o)

    __hash__ = object.__hash__


class LazySum(Tensor):
    """An integer tensor that is the sum of `terms`, arrays of its rank that broadcast to its shape."""

    __slots__ = ("_shape", "_v", "terms")

    def __init__(self, terms: list[np.ndarray], dtype: DType, shape: tuple[int, ...], lo: int, hi: int):
        self.terms, self.dtype, self._shape, self.lo, self.hi, self._v = terms, dtype, shape, lo, hi, None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def v(self) -> np.ndarray:
        if self._v is None:
            total = self.terms[0]
            for term in self.terms[1:]:
                total = total + term
            self._v = total if total.shape == self._shape else np.broadcast_to(total, self._shape)
        return self._v


class Pointer(Tensor):
    """Addresses `base + sum(terms)`: a Python int and int64 byte offsets that broadcast to `shape`."""

    __slots__ = ("_shape", "base", "terms")

    def __init__(self, base: int, terms: list[np.ndarray], shape: tuple[int, ...], dtype: DType):
        self.base, self.terms, self._shape, self.dtype = base, terms, shape, dtype
        self.lo = self.hi = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def v(self) -> object:
        """Addresses: an int, or an int64 array."""
        if not self.terms:
            return self.base if not self._shape else np.full(self._shape, self.base, np.int64)
        total = self.terms[0] + self.base
        for term in self.terms[1:]:
            total = total + term
        return np.broadcast_to(total, self._shape)

    def __repr__(self) -> str:
        return f"Pointer({self.dtype}, {self.base:#x}, {self._shape})"

    def __getitem__(self, key: object) -> Pointer:
        key = check_key(key)
        shape = np.broadcast_to(np.int8(0), self._shape)[key].shape
        return Pointer(self.base, [np.broadcast_to(t, self._shape)[key] for t in self.terms], shape, self.dtype)

    def __bool__(self) -> bool:
        return self.base != 0 if not self._shape else super().__bool__()

    def _same(self, v: np.ndarray) -> Tensor:
        return Pointer(0, [v], v.shape, self.dtype)

    def reshape(self, *shape: object) -> Tensor:
        return self._same(np.asarray(self.v, np.int64).reshape(shape_of(shape)))

    def broadcast_to(self, *shape: object) -> Tensor:
        return Pointer(self.base, self.terms, tuple(shape_of(shape)), self.dtype)


class ValueType:
    """What `x.type` shows of a value."""

    def __init__(self, value: Tensor):
        self.element_ty = self.scalar = value.dtype
        self.shape, self.layout, self.numel = value.shape, ANY_LAYOUT, value.numel

    def is_block(self) -> bool:
        return bool(self.shape)

    def __getattr__(self, name: str) -> object:
        return getattr(self.element_ty, name)


class Layout:
    """A layout: kept for its arguments, without effect on the values."""

    def __init__(self, kind: str, args: tuple = (), kwargs: dict | None = None):
        self.kind, self.args, self.kwargs = kind, args, kwargs or {}

    def __repr__(self) -> str:
        inside = [repr(a) for a in self.args] + [f"{k}={v!r}" for k, v in self.kwargs.items()]
        return f"{self.kind}({', '.join(inside)})"

    def __getattr__(self, name: str) -> object:
        if name in self.__dict__.get("kwargs", {}):
            return self.kwargs[name]
        raise AttributeError(f"layout {self.kind} was not given {name!r} by keyword")


ANY_LAYOUT = Layout("AnyLayout")


# --- helpers ---------------------------------------------------------------------------------------------------------

def check_key(key: object) -> tuple:
    key = key if isinstance(key, tuple) else (key,)
    if any(k is not None and k != slice(None) for k in key):
        raise TypeError("a tensor is indexed with ':' and None only")
    return key


def shape_of(shape: Sequence) -> list[int]:
    """Plain ints from a shape or permutation given as one sequence or as separate numbers."""
    if len(shape) == 1 and isinstance(shape[0], (tuple, list)):
        shape = shape[0]
    return [int(s) for s in shape]


def wrap(v: object, dtype: DType, lo: int | None = None, hi: int | None = None) -> Tensor:
    """A value from a NumPy array or a scalar of `dtype.calc`."""
    if type(v) is np.ndarray and v.ndim:
        return Tensor(v, dtype, lo, hi)
    if dtype.kind == "p":
        return Pointer(int(v), [], (), dtype)
    if dtype.kind == "f":
        return Scalar(dtype.calc.type(v), dtype)
    return Scalar(bool(v) if dtype.kind == "b" else int(v), dtype)


def number(value: object) -> object:
    """A Python number from a constant that may come from NumPy."""
    return value.item() if isinstance(value, np.generic) else value


def as_tensor(value: object) -> Tensor:
    """A value from a value or a Python number."""
    if isinstance(value, Tensor):
        return value
    value = number(value)
    if isinstance(value, (bool, int, float)):
        return wrap(value, dt.python_type(value))
    raise TypeError(_not_a_value(value))


def _not_a_value(value: object) -> str:
    if hasattr(value, "pending_mma"):
        raise AsyncFault("the result of an asynchronous warpgroup_mma is used before warpgroup_mma_wait has returned it")
    return f"{value!r} ({type(value).__name__}) is no tensor and no number"


def coerce(a: object, b: object, division: bool = False) -> tuple[object, object, DType]:
    """Both operands converted to their common type: (array or number, array or number, type)."""
    ta, tb = isinstance(a, Tensor), isinstance(b, Tensor)
    if ta and tb:
        ad, bd = a.dtype, b.dtype
        if ad is bd and (not division or ad.bits != 16):
            return a.v, b.v, ad
        dtype = dt.promote(ad, bd, division)
        return _as(a, dtype), _as(b, dtype), dtype
    if ta:
        b = number(b)
        if not isinstance(b, (bool, int, float)):
            raise TypeError(_not_a_value(b))
        dtype = dt.promote_python(a.dtype, b, division)
        return _as(a, dtype), _constant(b, dtype), dtype
    if tb:
        bv, av, dtype = coerce(b, a, division)
        return av, bv, dtype
    return coerce(as_tensor(a), as_tensor(b), division)


def _as(x: Tensor, dtype: DType) -> object:
    if x.dtype is dtype:
        return x.v
    if type(x) is Scalar:
        return cast(x, dtype, False).v
    return dt.convert(x.v, x.dtype, dtype)


def _constant(value: object, dtype: DType) -> object:
    if dtype.kind == "f":
        return dtype.calc.type(value)
    if dtype.kind == "8":
        raise TypeError("arithmetic on float8e4nv: convert with .to(gl.float32) first")
    if dtype.kind == "b":
        return bool(value)
    if not dtype.lo <= value <= dtype.hi:
        raise Overflow(f"the constant {value} does not fit {dtype}, the type of the tensor beside it")
    return int(value)


def _finish(v: object, dtype: DType) -> Tensor:
    if dtype.bits == 16 and dtype.kind == "f":
        v = dt.convert(np.asarray(v), dt.float32, dtype)
    return wrap(v, dtype)


def _ndim(x: object) -> int:
    return x.ndim if type(x) is np.ndarray else 0


# --- casts -----------------------------------------------------------------------------------------------------------

def cast(x: object, dtype: DType, bitcast: bool) -> Tensor:
    """`x` converted to `dtype`; between pointers and 64-bit integers the address is kept."""
    x = as_tensor(x)
    src = x.dtype
    if src is dtype:
        return x
    if src.kind == "p" or dtype.kind == "p":
        return _cast_pointer(x, dtype)
    if bitcast and src.bits != dtype.bits:
        raise TypeError(f"bitcast from {src} ({src.bits} bits) to {dtype} ({dtype.bits} bits)")
    if type(x) is LazySum and dtype is dt.int64:
        return LazySum([t.astype(np.int64) for t in x.terms], dtype, x.shape, x.lo, x.hi)
    if type(x) is Scalar and src.is_integer and dtype.kind in "iu" and not bitcast:
        return Scalar(_wrap_int(int(x.v), dtype), dtype)
    value = np.asarray(x.v, src.calc)
    out = dt.bitcast(value, src, dtype) if bitcast else dt.convert(value, src, dtype)
    keep = not bitcast and src.kind in "iu" and dtype.kind in "iu" and x.lo is not None
    keep = keep and dtype.lo <= x.lo and x.hi <= dtype.hi
    return wrap(out.reshape(x.shape), dtype, x.lo if keep else None, x.hi if keep else None)


def _cast_pointer(x: Tensor, dtype: DType) -> Tensor:
    if type(x) is Pointer and dtype.kind == "p":
        return Pointer(x.base, x.terms, x.shape, dtype)
    if dtype.kind == "p":
        if x.dtype not in (dt.int64, dt.uint64):
            raise TypeError(f"only 64-bit integers become pointers, not {x.dtype}")
        if type(x) is Scalar:
            return Pointer(x.v, [], (), dtype)
        return Pointer(0, [np.asarray(x.v).astype(np.int64)], x.shape, dtype)
    if dtype not in (dt.int64, dt.uint64, dt.int1):
        raise TypeError(f"a pointer becomes a 64-bit integer, not {dtype}")
    return wrap(np.asarray(x.v, np.int64).astype(dtype.calc), dtype)


def _wrap_int(value: int, dtype: DType) -> int:
    value &= (1 << dtype.bits) - 1
    return value - (1 << dtype.bits) if value > dtype.hi else value


# --- arithmetic ------------------------------------------------------------------------------------------------------

def add(a: object, b: object) -> Tensor:
    if type(a) is Pointer:
        return move_pointer(a, b, 1)
    if type(b) is Pointer:
        return move_pointer(b, a, 1)
    return _linear(np.add, a, b)


def subtract(a: object, b: object) -> Tensor:
    if type(a) is Pointer:
        if type(b) is Pointer:
            diff = (np.asarray(a.v) - np.asarray(b.v)) // a.dtype.element_ty.itemsize
            return wrap(diff, dt.int64)
        return move_pointer(a, b, -1)
    return _linear(np.subtract, a, b)


def multiply(a: object, b: object) -> Tensor:
    return _linear(np.multiply, a, b)


_PYTHON = {np.add: operator.add, np.subtract: operator.sub, np.multiply: operator.mul}


def _bounds_of(x: object) -> tuple[int, int]:
    return x.bounds() if isinstance(x, Tensor) else (int(x), int(x))


def _combine_bounds(op: Callable, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    if op is np.add:
        return a[0] + b[0], a[1] + b[1]
    if op is np.subtract:
        return a[0] - b[1], a[1] - b[0]
    corners = (a[0] * b[0], a[0] * b[1], a[1] * b[0], a[1] * b[1])
    return min(corners), max(corners)


def _linear(op: Callable, a: object, b: object) -> Tensor:
    """Sum, difference or product; signed overflow is an error."""
    if type(a) is LazySum or type(b) is LazySum:
        lazy = _lazy(op, a, b)
        if lazy is not None:
            return lazy
    av, bv, dtype = coerce(a, b)
    if dtype.kind == "f":
        return _finish(op(av, bv), dtype)
    if dtype.kind == "b":
        raise TypeError("arithmetic on int1: convert with .to(gl.int32) first")
    if dtype.kind == "u":
        return _wrapping(op, av, bv, dtype)
    lo, hi = _combine_bounds(op, _bounds_of(a), _bounds_of(b))
    if lo < dtype.lo or hi > dtype.hi:
        lo, hi = _exact(op, av, bv, dtype)
    if type(av) is not np.ndarray and type(bv) is not np.ndarray:
        return Scalar(_PYTHON[op](av, bv), dtype)
    if op is not np.multiply and _ndim(av) >= 2 and _ndim(bv) >= 2 and av.shape != bv.shape:
        shape = np.broadcast_shapes(av.shape, bv.shape)
        return LazySum([av, bv if op is np.add else -bv], dtype, shape, lo, hi)
    return Tensor(op(av, bv, dtype=dtype.calc), dtype, lo, hi)


def _wrapping(op: Callable, av: object, bv: object, dtype: DType) -> Tensor:
    if type(av) is not np.ndarray and type(bv) is not np.ndarray:
        return Scalar(_wrap_int(_PYTHON[op](av, bv), dtype), dtype)
    return Tensor(op(av, bv, dtype=dtype.calc), dtype)


def _exact(op: Callable, av: object, bv: object, dtype: DType) -> tuple[int, int]:
    """Bounds of the exact result; `Overflow` if it does not fit."""
    if dtype.bits < 64:
        exact = op(np.asarray(av, np.int64), np.asarray(bv, np.int64))
    else:
        exact = op(np.asarray(av, object), np.asarray(bv, object))
    lo, hi = int(np.min(exact)), int(np.max(exact))
    if dtype.bits >= 32 and (lo < dtype.lo or hi > dtype.hi):
        raise Overflow(f"{dtype} overflow in {op.__name__}: the result reaches {lo if lo < dtype.lo else hi}")
    return max(lo, dtype.lo), min(hi, dtype.hi)


def _lazy(op: Callable, a: object, b: object) -> LazySum | None:
    """`a op b` as a sum of terms, or None if it is none that fits the type."""
    swapped = type(a) is not LazySum
    x, y = (b, a) if swapped else (a, b)
    dtype = x.dtype
    if isinstance(y, Tensor) and y.dtype is not dtype or not isinstance(y, (Tensor, int)) or isinstance(y, bool):
        return None
    lo, hi = _combine_bounds(op, _bounds_of(a), _bounds_of(b))
    if lo < dtype.lo or hi > dtype.hi:
        return None
    scalar = y if isinstance(y, int) else y.v if type(y) is Scalar else None
    if op is np.multiply:
        if scalar is None:
            return None
        return LazySum([t * dtype.calc.type(scalar) for t in x.terms], dtype, x.shape, lo, hi)
    if op is np.subtract and swapped:
        return None
    sign = -1 if op is np.subtract else 1
    if scalar is not None:
        terms = [x.terms[0] + dtype.calc.type(sign * scalar), *x.terms[1:]]
        return LazySum(terms, dtype, x.shape, lo, hi)
    added = y.terms if type(y) is LazySum else [y.v]
    if any(t.ndim != len(x.shape) for t in added):
        return None
    terms = merge_terms(x.terms, [t * dtype.calc.type(sign) if sign < 0 else t for t in added])
    return LazySum(terms, dtype, np.broadcast_shapes(x.shape, y.shape), lo, hi)


def merge_terms(first: list[np.ndarray], second: list[np.ndarray]) -> list[np.ndarray]:
    """The terms of a sum, those of equal shape added."""
    out = list(first)
    for term in second:
        for i, old in enumerate(out):
            if old.shape == term.shape:
                out[i] = old + term
                break
        else:
            out.append(term)
    return out


def move_pointer(p: Pointer, offset: object, sign: int) -> Pointer:
    """`p + offset` (or minus) in elements."""
    size = p.dtype.element_ty.itemsize * sign
    if type(offset) is int:
        return Pointer(p.base + offset * size, p.terms, p._shape, p.dtype)
    if type(offset) is Scalar and offset.dtype.kind in "iu":
        return Pointer(p.base + offset.v * size, p.terms, p._shape, p.dtype)
    offset = as_tensor(offset)
    if offset.dtype.kind not in "iu":
        raise TypeError(f"a pointer is moved by integers, not by {offset.dtype}")
    terms = offset.terms if type(offset) is LazySum else [offset.v]
    terms = [np.multiply(t, size, dtype=np.int64) for t in terms]
    shape = offset.shape
    if p._shape and p._shape != shape:
        shape = np.broadcast_shapes(p._shape, shape)
    return Pointer(p.base, merge_terms(p.terms, terms) if p.terms else terms, shape, p.dtype)


def divide(a: object, b: object) -> Tensor:
    """`/`: true division; integers divide as fp32."""
    av, bv, dtype = coerce(a, b, division=True)
    if dtype.is_integer:
        dtype = dt.float32
        av, bv = np.asarray(av).astype(np.float32), np.asarray(bv).astype(np.float32)
    return _finish(np.true_divide(av, bv), dtype)


def int_divide(a: object, b: object, remainder: bool) -> Tensor:
    """`//` and `%`, as the hardware has them (towards zero); operands for which Python differs are an error."""
    av, bv, dtype = coerce(a, b, division=True)
    if dtype.kind == "f":
        if not remainder:
            raise TypeError("// needs integers")
        return _finish(np.fmod(av, bv), dtype)
    if np.any(np.equal(bv, 0)):
        raise OutOfBounds("integer division by zero")
    quotient, rest = np.divmod(av, bv)
    if dtype.kind == "i" and (np.any(np.less(av, 0)) or np.any(np.less(bv, 0))):
        if np.any((rest != 0) & (np.less(av, 0) != np.less(bv, 0))):
            raise Overflow("// or % on operands of different sign, where Python rounds down and the GPU towards zero")
    return wrap(rest if remainder else quotient, dtype)


def bitwise(op: Callable, a: object, b: object) -> Tensor:
    av, bv, dtype = coerce(a, b)
    if not dtype.is_integer:
        raise TypeError(f"{op.__name__} needs integers, not {dtype}")
    if type(av) is not np.ndarray and type(bv) is not np.ndarray:
        r = av & bv if op is np.bitwise_and else av | bv if op is np.bitwise_or else av ^ bv
        return Scalar(r, dtype)
    if op is np.bitwise_and and dtype.kind == "i":
        mask = av if type(av) is int else bv if type(bv) is int else -1
        if mask >= 0:
            return Tensor(op(av, bv), dtype, 0, mask)
    return Tensor(op(av, bv), dtype)


def shift(a: object, b: object, left: bool) -> Tensor:
    av, bv, dtype = coerce(a, b)
    if dtype.kind not in "iu":
        raise TypeError(f"a shift needs integers, not {dtype}")
    if np.any(np.less(bv, 0)) or np.any(np.greater_equal(bv, dtype.bits)):
        raise Overflow(f"shift of a {dtype} by less than 0 or more than {dtype.bits - 1} bits")
    if type(av) is int and type(bv) is int:
        return Scalar(_wrap_int(av << bv, dtype) if left else av >> bv, dtype)
    return Tensor((np.left_shift if left else np.right_shift)(av, bv, dtype=dtype.calc), dtype)


def compare(op: Callable, a: object, b: object) -> Tensor:
    if b is None or a is None:
        raise TypeError("compare with None by `is`, not by an operator")
    if type(a) is Pointer or type(b) is Pointer:
        return wrap(op(as_tensor(a).v, as_tensor(b).v), dt.int1)
    av, bv, dtype = coerce(a, b)
    if dtype.kind == "8":
        raise TypeError("comparison of float8e4nv: convert with .to(gl.float32) first")
    return wrap(op(av, bv), dt.int1)


def unary(op: Callable, x: object) -> Tensor:
    """A function of floats, computed in the type of `x` (half precision rounded, integers rejected)."""
    x = as_tensor(x)
    if x.dtype.kind != "f":
        raise TypeError(f"{op.__name__} needs floats, not {x.dtype}")
    return _finish(op(x.v), x.dtype)


def require_aligned(address: int, size: int, what: str) -> None:
    if address % size:
        raise Misaligned(f"{what}: address {address:#x} is not a multiple of {size}")
