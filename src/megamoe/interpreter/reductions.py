"""Reductions and scans of `gl`."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Sequence

import numpy as np

from . import dtypes as dt
from .arith import cast as _cast
from .dtypes import DType, bfloat16, float32, int32, int64, uint32
from .errors import DeviceAssert, Overflow
from .values import Tensor, as_tensor, wrap


def _int(x: object) -> int:
    return x if type(x) is int else int(as_tensor(x).v)


def ravel(x: Tensor) -> Tensor:
    """One dimension of all elements."""
    return x.reshape(x.numel)


def _tree(op: Callable, x: np.ndarray, axis: int) -> np.ndarray:
    """Reduce by halves: the result does not depend on the other dimensions or on how the array lies
    in memory.
    """
    x = np.moveaxis(x, axis, 0)
    while x.shape[0] > 1:
        half = x.shape[0] // 2
        x = (
            op(x[:half], x[half : 2 * half])
            if x.shape[0] % 2 == 0
            else np.concatenate([op(x[:half], x[half : 2 * half]), x[2 * half :]])
        )
    return x[0]


def _widened(x: Tensor) -> Tensor:
    """Small integers reduce as 32 bits, bfloat16 as fp32."""
    if x.dtype.is_integer and x.dtype.bits < 32:
        return _cast(x, uint32 if x.dtype.kind == "u" else int32, False)
    return _cast(x, float32, False) if x.dtype is bfloat16 else x


def _reduce(
    x: Tensor, axis: object, keep_dims: object, op: Callable, exact: Callable | None
) -> Tensor:
    x = as_tensor(x)
    v = np.asarray(x.v)
    if axis is None:
        v, axis = v.reshape(-1), 0
        keep_shape = (1,) * len(x.shape)
    else:
        axis = _int(axis)
        keep_shape = v.shape[:axis] + (1,) + v.shape[axis + 1 :] if axis >= 0 else None
    if not x.shape:
        return x
    out = exact(v, axis) if exact is not None and x.dtype.is_integer else _tree(op, v, axis)
    out = np.asarray(out, x.dtype.calc)
    return wrap(out.reshape(keep_shape) if keep_dims else out, x.dtype)


def _exact_sum(v: np.ndarray, axis: int) -> np.ndarray:
    if v.dtype.kind == "u" or v.dtype.itemsize == 8:
        return np.add.reduce(v, axis=axis, dtype=v.dtype)
    out = np.add.reduce(v, axis=axis, dtype=np.int64)
    short = out.astype(v.dtype)
    if not (short == out).all():
        raise Overflow(f"{v.dtype} overflow in sum")
    return short


def sum(
    input: Tensor, axis: object = None, keep_dims: bool = False, dtype: DType | None = None
) -> Tensor:
    x = as_tensor(input) if dtype is not None else _widened(as_tensor(input))
    x = x if dtype is None else _cast(x, dt.as_dtype(dtype), False)
    return _reduce(x, axis, keep_dims, np.add, _exact_sum)


def max(
    input: Tensor,
    axis: object = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> object:
    return _pick(np.fmax, np.max, np.argmax, input, axis, return_indices, keep_dims)


def min(
    input: Tensor,
    axis: object = None,
    return_indices: bool = False,
    return_indices_tie_break_left: bool = True,
    keep_dims: bool = False,
) -> object:
    return _pick(np.fmin, np.min, np.argmin, input, axis, return_indices, keep_dims)


def _pick(
    op: np.ufunc,
    exact: Callable,
    where_: Callable,
    x: Tensor,
    axis: object,
    indices: bool,
    keep_dims: bool,
) -> object:
    x = _widened(as_tensor(x))
    out = _reduce(x, axis, keep_dims, op, lambda v, a: exact(v, axis=a))
    if not indices:
        return out
    at = where_(x.v, axis=_int(axis), keepdims=bool(keep_dims))
    return out, wrap(np.asarray(at, np.int32), int32)


def xor_sum(input: Tensor, axis: object = None, keep_dims: bool = False) -> Tensor:
    return _reduce(
        as_tensor(input),
        axis,
        keep_dims,
        np.bitwise_xor,
        lambda v, a: np.bitwise_xor.reduce(v, axis=a),
    )


def reduce_or(input: Tensor, axis: object, keep_dims: bool = False) -> Tensor:
    return _reduce(
        as_tensor(input),
        axis,
        keep_dims,
        np.bitwise_or,
        lambda v, a: np.bitwise_or.reduce(v, axis=a),
    )


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


def associative_scan(
    input: object, axis: object, combine_fn: Callable, reverse: bool = False
) -> object:
    """Inclusive scan with an associative JIT function."""
    parts, axis = _tensors(input), _int(axis)
    rows = [np.moveaxis(np.asarray(p.v), axis, 0) for p in parts]
    if reverse:
        rows = [r[::-1] for r in rows]
    kinds = [p.dtype for p in parts]
    code = getattr(combine_fn, "__code__", None)
    if (
        len(parts) == 1
        and kinds[0] in (int32, int64)
        and code is not None
        and code.co_code == _PLAIN_SUM
    ):
        total = np.cumsum(rows[0], axis=0, dtype=np.int64)
        if kinds[0].lo <= int(total.min()) and int(total.max()) <= kinds[0].hi:
            rows = [total.astype(kinds[0].calc)]
            return _scanned(rows, kinds, axis, reverse, input)
    step, n = 1, rows[0].shape[0]
    while step < n:
        a = [wrap(r[:-step], d) for r, d in zip(rows, kinds, strict=True)]
        b = [wrap(r[step:], d) for r, d in zip(rows, kinds, strict=True)]
        new = [
            np.asarray(_cast(t, d, False).v)
            for t, d in zip(_apply(combine_fn, a, b), kinds, strict=True)
        ]
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


def histogram(
    input: Tensor, num_bins: int, mask: Tensor | None = None, layout: object = None
) -> Tensor:
    values = np.asarray(input.v)
    if mask is not None:
        values = values[np.broadcast_to(mask.v, values.shape)]
    bins = _int(num_bins)
    if values.size and (values.min() < 0 or values.max() >= bins):
        raise DeviceAssert(
            f"histogram: values from {values.min()} to {values.max()}, the bins are 0 to {bins - 1}"
        )
    return Tensor(np.bincount(values.astype(np.int64), minlength=bins).astype(np.int32), int32)


def gather(src: Tensor, index: Tensor, axis: int) -> Tensor:
    axis = _int(axis)
    index_v = np.asarray(index.v)
    if index_v.size and (index_v.min() < 0 or index_v.max() >= src.shape[axis]):
        raise DeviceAssert(
            f"gather: indices from {index_v.min()} to {index_v.max()}, dimension {axis} has "
            f"{src.shape[axis]}"
        )
    return Tensor(np.take_along_axis(np.asarray(src.v), index_v.astype(np.int64), axis), src.dtype)
