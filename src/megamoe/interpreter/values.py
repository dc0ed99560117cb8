"""Values of a kernel: scalars, tensors, pointers (their arithmetic is in `arith`).

Values are immutable.  Integer tensors carry bounds, so that most additions need no overflow check,
and a sum of a column and a row stays a `LazySum` until somebody needs its elements: addresses of a
tile are such sums, and memory accesses are much faster on rows than on lanes.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence

import numpy as np

from . import dtypes as dt
from .dtypes import DType
from .errors import AsyncFault

EARLY_USE = (
    "the result of an asynchronous warpgroup_mma is used before warpgroup_mma_wait returned it"
)


class Tensor:
    """A value: array `v` (of `dtype.calc`) and `dtype`; `lo`, `hi` bound integers if known."""

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
            v = self.v
            self.lo = int(np.minimum.reduce(v, axis=None))
            self.hi = int(np.maximum.reduce(v, axis=None))
        return self.lo, self.hi

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

    __hash__ = object.__hash__

    def __pos__(self) -> Tensor:
        return self


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

    # Loop counters and conditions of every role are scalars: worth a short path.
    def __add__(self, o: object) -> Tensor:
        d = self.dtype
        if type(o) is int or type(o) is Scalar and o.dtype is d:
            r = self.v + (o if type(o) is int else o.v)
            if d.kind == "i" and d.lo <= r <= d.hi:
                return Scalar(r, d)
        return Tensor.__add__(self, o)

    __radd__ = __add__

    def __sub__(self, o: object) -> Tensor:
        d = self.dtype
        if type(o) is int or type(o) is Scalar and o.dtype is d:
            r = self.v - (o if type(o) is int else o.v)
            if d.kind == "i" and d.lo <= r <= d.hi:
                return Scalar(r, d)
        return Tensor.__sub__(self, o)

    def __mul__(self, o: object) -> Tensor:
        d = self.dtype
        if type(o) is int or type(o) is Scalar and o.dtype is d:
            r = self.v * (o if type(o) is int else o.v)
            if d.kind == "i" and d.lo <= r <= d.hi:
                return Scalar(r, d)
        return Tensor.__mul__(self, o)

    __rmul__ = __mul__

    def __floordiv__(self, o: object) -> Tensor:
        d = self.dtype
        if d.kind == "i" and (type(o) is int or type(o) is Scalar and o.dtype is d):
            b = o if type(o) is int else o.v
            if self.v >= 0 and b > 0:
                return Scalar(self.v // b, d)
        return Tensor.__floordiv__(self, o)

    def __mod__(self, o: object) -> Tensor:
        d = self.dtype
        if d.kind == "i" and (type(o) is int or type(o) is Scalar and o.dtype is d):
            b = o if type(o) is int else o.v
            if self.v >= 0 and b > 0:
                return Scalar(self.v % b, d)
        return Tensor.__mod__(self, o)


def _short_comparison(name: str, op: Callable[[object, object], bool]) -> None:
    general = f"__{name}__"

    def compare(self: Scalar, o: object) -> Tensor:
        if type(o) is int or type(o) is Scalar and o.dtype is self.dtype:
            return TRUE if op(self.v, o if type(o) is int else o.v) else FALSE
        return getattr(Tensor, general)(self, o)

    setattr(Scalar, general, compare)


def _short_logic(name: str, op: Callable[[object, object], object]) -> None:
    general = f"__{name}__"

    def combine(self: Scalar, o: object) -> Tensor:
        if type(o) is Scalar and o.dtype is self.dtype and o.dtype.is_integer:
            return Scalar(op(self.v, o.v), o.dtype)
        return getattr(Tensor, general)(self, o)

    setattr(Scalar, general, combine)


TRUE, FALSE = Scalar(True, dt.int1), Scalar(False, dt.int1)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _short_comparison(_name, getattr(operator, _name))
for _name, _op in {"and": operator.and_, "or": operator.or_, "xor": operator.xor}.items():
    _short_logic(_name, _op)
Scalar.__hash__ = object.__hash__


class LazySum(Tensor):
    """An integer tensor: the sum of `terms`, arrays of its rank that broadcast to its shape."""

    __slots__ = ("_shape", "_v", "terms")

    def __init__(
        self, terms: list[np.ndarray], dtype: DType, shape: tuple[int, ...], lo: int, hi: int
    ):
        self.terms, self.dtype, self._shape, self.lo, self.hi, self._v = (
            terms,
            dtype,
            shape,
            lo,
            hi,
            None,
        )

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
    """Addresses `base + sum(terms)`: an int and int64 byte offsets that broadcast to `shape`."""

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
        return Pointer(
            self.base, [np.broadcast_to(t, self._shape)[key] for t in self.terms], shape, self.dtype
        )

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


# --- helpers --------------------------------------------------------------------------------------


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
    if type(value) is int and -0x80000000 <= value <= 0x7FFFFFFF:
        return Scalar(value, dt.int32)
    value = number(value)
    if isinstance(value, (bool, int, float)):
        return wrap(value, dt.python_type(value))
    raise TypeError(not_a_value(value))


def not_a_value(value: object) -> str:
    if hasattr(value, "pending_mma"):
        raise AsyncFault(EARLY_USE)
    return f"{value!r} ({type(value).__name__}) is no tensor and no number"
