"""Triton's arithmetic on the values of a kernel, and the operators of `Tensor`."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np

from . import dtypes as dt
from .dtypes import DType
from .errors import OutOfBounds, Overflow
from .values import LazySum, Pointer, Scalar, Tensor, as_tensor, not_a_value, number, wrap


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
            raise TypeError(not_a_value(b))
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
        raise Overflow(
            f"the constant {value} does not fit {dtype}, the type of the tensor beside it"
        )
    return int(value)


def _finish(v: object, dtype: DType) -> Tensor:
    if dtype.bits == 16 and dtype.kind == "f":
        v = dt.convert(np.asarray(v), dt.float32, dtype)
    return wrap(v, dtype)


def _ndim(x: object) -> int:
    return x.ndim if type(x) is np.ndarray else 0


# --- casts ----------------------------------------------------------------------------------------


def cast(x: object, dtype: DType, bitcast: bool) -> Tensor:
    """`x` converted to `dtype`; between pointers and 64-bit integers the address is kept."""
    if (
        type(x) is Scalar
        and x.dtype.kind in "ib"
        and dtype.kind == "i"
        and x.dtype.bits <= dtype.bits
    ):
        return x if x.dtype is dtype else Scalar(int(x.v), dtype)
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
    if bitcast or not src.is_integer or dtype.kind not in "iu":
        return wrap(out.reshape(x.shape), dtype)
    lo, hi = (src.lo, src.hi) if x.lo is None else (x.lo, x.hi)
    keep = dtype.lo <= lo and hi <= dtype.hi and (x.lo is not None or src.bits < dtype.bits)
    return wrap(out.reshape(x.shape), dtype, lo if keep else None, hi if keep else None)


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


# --- arithmetic -----------------------------------------------------------------------------------


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
        raise Overflow(
            f"{dtype} overflow in {op.__name__}: the result reaches {lo if lo < dtype.lo else hi}"
        )
    return max(lo, dtype.lo), min(hi, dtype.hi)


def _lazy(op: Callable, a: object, b: object) -> LazySum | None:
    """`a op b` as a sum of terms, or None if it is none that fits the type."""
    swapped = type(a) is not LazySum
    x, y = (b, a) if swapped else (a, b)
    dtype = x.dtype
    if (
        isinstance(y, Tensor)
        and y.dtype is not dtype
        or not isinstance(y, (Tensor, int))
        or isinstance(y, bool)
    ):
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
    if offset.lo is not None and offset.lo == offset.hi:
        shape = offset.shape if not p._shape else np.broadcast_shapes(p._shape, offset.shape)
        return Pointer(p.base + offset.lo * size, p.terms, shape, p.dtype)
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
    """`//` and `%`, as the hardware has them (towards zero); operands for which Python differs are
    an error.
    """
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
            raise Overflow(
                "// or % on operands of different sign: Python rounds down, the GPU towards zero"
            )
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
    lo, hi = (bv, bv) if type(bv) is int else (int(np.min(bv)), int(np.max(bv)))
    if lo < 0 or hi >= dtype.bits:
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
    """A function of floats, computed in the type of `x` (half precision rounded, integers
    rejected).
    """
    x = as_tensor(x)
    if x.dtype.kind != "f":
        raise TypeError(f"{op.__name__} needs floats, not {x.dtype}")
    return _finish(op(x.v), x.dtype)


# --- operators of Tensor --------------------------------------------------------------------------


def _to(
    self: Tensor, dtype: DType, fp_downcast_rounding: object = None, bitcast: bool = False
) -> Tensor:
    return cast(self, dt.as_dtype(dtype), bool(bitcast))


def _join(self: Tensor, other: Tensor) -> Tensor:
    a, b, dtype = coerce(self, other)
    return Tensor(np.stack(np.broadcast_arrays(a, b), axis=-1), dtype)


def _negative(self: Tensor) -> Tensor:
    return wrap(-self.v, self.dtype) if self.dtype.kind == "f" else subtract(0, self)


def _invert(self: Tensor) -> Tensor:
    if not self.dtype.is_integer:
        raise TypeError(f"~ needs integers, not {self.dtype}")
    if type(self.v) is bool:
        return Scalar(not self.v, self.dtype)
    if type(self.v) is int and self.dtype.kind == "u":
        return Scalar(self.v ^ self.dtype.hi, self.dtype)
    return wrap(~self.v, self.dtype)


def _both_ways(name: str, run: Callable[[object, object], Tensor]) -> None:
    setattr(Tensor, f"__{name}__", lambda self, o: run(self, o))
    setattr(Tensor, f"__r{name}__", lambda self, o: run(o, self))


for _name, _run in {
    "add": add,
    "sub": subtract,
    "mul": multiply,
    "truediv": divide,
    "floordiv": lambda a, b: int_divide(a, b, False),
    "mod": lambda a, b: int_divide(a, b, True),
    "and": lambda a, b: bitwise(np.bitwise_and, a, b),
    "or": lambda a, b: bitwise(np.bitwise_or, a, b),
    "xor": lambda a, b: bitwise(np.bitwise_xor, a, b),
    "lshift": lambda a, b: shift(a, b, True),
    "rshift": lambda a, b: shift(a, b, False),
}.items():
    _both_ways(_name, _run)
for _name, _op in {
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}.items():
    setattr(Tensor, f"__{_name}__", lambda self, o, op=_op: compare(op, self, o))
Tensor.__hash__ = object.__hash__
Tensor.__neg__, Tensor.__invert__, Tensor.to, Tensor.join = _negative, _invert, _to, _join
