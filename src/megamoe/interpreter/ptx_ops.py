"""PTX instructions without side effects, on Python ints and on int64 arrays.

32-bit registers hold 0 to 2^32 - 1, predicates bool.  64-bit registers hold 0 to 2^64 - 1 as Python
ints and wrap as int64 in arrays.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from .dtypes import E4M3_64, e4m3_encode
from .errors import UnsupportedOperation

M32, M64 = 0xFFFFFFFF, 0xFFFFFFFFFFFFFFFF
_NIBBLE_SHIFTS = np.array([0, 4, 8, 12])


def width_of(parts: list[str]) -> int:
    """Bits of the instruction's (first) type suffix."""
    for part in parts[1:]:
        if part == "pred":
            return 1
        if part[0] in "busf" and part[1:] in ("8", "16", "32", "64"):
            return int(part[1:])
    return 32


def _kind(parts: list[str]) -> str:
    for part in parts[1:]:
        if part[0] in "busf" and part[1:] in ("8", "16", "32", "64"):
            return part[0]
    return "b"


def _signed(value: object, width: int) -> object:
    if isinstance(value, np.ndarray):
        if width == 64:
            return value
        half = 1 << (width - 1)
        return ((value & ((1 << width) - 1)) ^ half) - half
    value = int(value) & ((1 << width) - 1)
    return value - (1 << width) if value >> (width - 1) else value


def _trim(value: object, width: int) -> object:
    if isinstance(value, np.ndarray):
        return value if width == 64 else value & ((1 << width) - 1)
    return int(value) & ((1 << width) - 1)


def _typed(i: object, value: object) -> object:
    """Signed or unsigned reading of a register by the instruction's type."""
    return _signed(value, i.width) if _kind(i.parts) == "s" else _trim(value, i.width)


def _mov(i: object, v: list) -> object:
    return v[0] if i.width == 1 else _trim(v[0], i.width)


def _add(i: object, v: list) -> object:
    return _float(i, np.add, v) if _kind(i.parts) == "f" else _trim(v[0] + v[1], i.width)


def _sub(i: object, v: list) -> object:
    return _float(i, np.subtract, v) if _kind(i.parts) == "f" else _trim(v[0] - v[1], i.width)


def _mul(i: object, v: list) -> object:
    if _kind(i.parts) == "f":
        return _float(i, np.multiply, v)
    if "wide" not in i.parts and "hi" not in i.parts:
        return _trim(v[0] * v[1], i.width)
    a, b = _typed(i, v[0]), _typed(i, v[1])
    if "wide" in i.parts:
        return _trim(a * b, 64)
    if i.width != 32:
        raise UnsupportedOperation(f"inline PTX: {i.name}")
    return _trim((a * b) >> 32, 32)


def _mad(i: object, v: list) -> object:
    if "wide" in i.parts:
        return _trim(_mul(i, v) + v[2], 64)
    if "hi" in i.parts or _kind(i.parts) == "f":
        return _trim(_mul(i, v) + v[2], i.width)
    return _trim(v[0] * v[1] + v[2], i.width)


def _logic(op: Callable) -> Callable:
    """Of operands that already have the width of the instruction."""
    return lambda i, v: op(v[0], v[1])


def _not(i: object, v: list) -> object:
    if i.width == 1:
        return np.logical_not(v[0])
    return _trim(~v[0], i.width)


def _shl(i: object, v: list) -> object:
    if isinstance(v[1], int):
        return 0 * v[0] if v[1] >= i.width else _trim(v[0] << v[1], i.width)
    return np.where(
        v[1] >= i.width, 0, _trim(np.left_shift(v[0], np.minimum(v[1], i.width - 1)), i.width)
    )


def _shr(i: object, v: list) -> object:
    value = _typed(i, v[0])
    count = min(v[1], i.width) if isinstance(v[1], int) else np.minimum(v[1], i.width)
    if isinstance(value, np.ndarray) and i.width == 64 and _kind(i.parts) != "s":
        raise UnsupportedOperation(f"inline PTX: {i.name} on all lanes")
    return _trim(value >> count, i.width)


def _min(i: object, v: list) -> object:
    if _kind(i.parts) == "f":
        return _float(i, np.fmin, v)
    return _trim(_choose(np.minimum, min, _typed(i, v[0]), _typed(i, v[1])), i.width)


def _max(i: object, v: list) -> object:
    if _kind(i.parts) == "f":
        return _float(i, np.fmax, v)
    return _trim(_choose(np.maximum, max, _typed(i, v[0]), _typed(i, v[1])), i.width)


def _choose(array_op: Callable, op: Callable, a: object, b: object) -> object:
    return array_op(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else op(a, b)


def _neg(i: object, v: list) -> object:
    if _kind(i.parts) == "f":
        return v[0] ^ (1 << (i.width - 1))
    return _trim(0 - v[0], i.width)


def _abs(i: object, v: list) -> object:
    if _kind(i.parts) == "f":
        return v[0] & ((1 << (i.width - 1)) - 1)
    return _trim(abs(_signed(v[0], i.width)), i.width)


def _selp(i: object, v: list) -> object:
    if isinstance(v[2], np.ndarray):
        return np.where(v[2], v[0], v[1])
    return v[0] if v[2] else v[1]


def _prmt(i: object, v: list) -> object:
    """Default mode: each result byte is one of eight, or its sign spread over the byte."""
    if len(i.parts) > 2:
        raise UnsupportedOperation(f"inline PTX: {i.name}")
    low, high, selector = v
    if not any(isinstance(x, np.ndarray) for x in v):
        return _prmt_number(low | high << 32, selector)
    shape = np.broadcast_shapes(*[np.shape(x) for x in v])
    pool = np.empty((*shape, 2), np.uint32)
    pool[..., 0], pool[..., 1] = low, high
    nibbles = np.asarray(selector)[..., None] >> _NIBBLE_SHIFTS
    first_byte = np.arange(0, 8 * pool.size // 2, 8).reshape(*shape, 1)
    got = pool.reshape(-1).view(np.uint8)[(nibbles & 7) + first_byte]
    if (nibbles & 8).any():
        got = np.where(nibbles & 8, (got >> 7) * np.uint8(255), got)
    return got.reshape(-1).view(np.uint32).reshape(shape).astype(np.int64)


def _prmt_number(pool: int, selector: int) -> int:
    out = 0
    for byte in range(4):
        nibble = selector >> (4 * byte) & 15
        got = pool >> (8 * (nibble & 7)) & 0xFF
        out |= ((got >> 7) * 0xFF if nibble & 8 else got) << (8 * byte)
    return out


# Usual tables, with fewer operations than their sums of products.
_LOP3: dict[int, Callable] = {
    0xEA: lambda a, b, c: a & b | c,
    0xF8: lambda a, b, c: a | b & c,
    0xA8: lambda a, b, c: (a | b) & c,
    0xCA: lambda a, b, c: a & b | ~a & c,
    0x96: lambda a, b, c: a ^ b ^ c,
    0x80: lambda a, b, c: a & b & c,
    0xFE: lambda a, b, c: a | b | c,
}


def _lop3(i: object, v: list) -> object:
    a, b, c, table = v
    short = _LOP3.get(table)
    if short is not None:
        return short(a, b, c)
    out = 0
    for k in range(8):
        if table >> k & 1:
            out = out | (a if k & 4 else ~a) & (b if k & 2 else ~b) & (c if k & 1 else ~c)
    return _trim(out, 32)


def _bfe(i: object, v: list) -> object:
    if _kind(i.parts) != "u" or not all(isinstance(x, int) for x in v[1:]):
        raise UnsupportedOperation(f"inline PTX: {i.name}")
    return (v[0] >> v[1]) & ((1 << v[2]) - 1)


def _bits_to_float(value: object, width: int) -> np.ndarray:
    raw = np.asarray(value, np.uint64 if not isinstance(value, np.ndarray) else np.int64)
    if width == 64:
        return raw.view(np.float64)
    return raw.astype(np.uint32).view(np.float32)


def _float_to_bits(value: np.ndarray, width: int, scalar: bool) -> object:
    if width == 64:
        out = np.asarray(value, np.float64).view(np.int64)
    else:
        out = np.asarray(value, np.float32).view(np.uint32).astype(np.int64)
    return int(out) & M64 if scalar else out


def _float(i: object, op: Callable, v: list) -> object:
    scalar = not any(isinstance(x, np.ndarray) for x in v)
    return _float_to_bits(op(*[_bits_to_float(x, i.width) for x in v]), i.width, scalar)


def _fma(i: object, v: list) -> object:
    if i.width != 32:
        raise UnsupportedOperation(f"inline PTX: {i.name}")
    return _float(i, lambda a, b, c: (a.astype(np.float64) * b + c).astype(np.float32), v)


def _unary_float(op: Callable) -> Callable:
    def evaluate(i: object, v: list) -> object:
        flush = "ftz" in i.parts

        def flushed(x: np.ndarray) -> np.ndarray:
            tiny = np.abs(x) < np.finfo(x.dtype).tiny
            return np.where(tiny, np.copysign(x.dtype.type(0), x), x) if flush else x

        with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
            return _float(i, lambda x: flushed(op(flushed(x))), v)

    return evaluate


def _halves(value: object) -> np.ndarray:
    """The two fp16 of a word, the low one first, as float64 [.., 2]."""
    words = np.asarray(value, np.int64)[..., None] >> np.array([0, 16])
    return (words & 0xFFFF).astype(np.uint16).view(np.float16).astype(np.float64)


def _from_halves(halves: np.ndarray, v: list) -> object:
    """Rounded to nearest even and packed; a Python int where no operand is an array."""
    with np.errstate(over="ignore"):
        bits = halves.astype(np.float16).view(np.uint16).astype(np.int64)
    return _packed(bits, 16, v)


def _packed(fields: np.ndarray, width: int, v: list) -> object:
    out = fields[..., 0] | fields[..., 1] << width
    return out if any(isinstance(x, np.ndarray) for x in v) else int(out)


def _mul_halves(i: object, v: list) -> object:
    return _from_halves(_halves(v[0]) * _halves(v[1]), v)


def _ne_halves(i: object, v: list) -> object:
    """1.0 in each half where both numbers are known and differ."""
    a, b = _halves(v[0]), _halves(v[1])
    return _from_halves(((a < b) | (a > b)).astype(np.float64), v)


def _e4m3_to_halves(i: object, v: list) -> object:
    codes = np.asarray(v[0], np.int64)[..., None] >> np.array([0, 8])
    return _from_halves(E4M3_64[codes & 0xFF], v)


def _halves_to_e4m3(i: object, v: list) -> object:
    return _packed(e4m3_encode(_halves(v[0]).astype(np.float32)).astype(np.int64), 8, v)


def _popc(i: object, v: list) -> object:
    if isinstance(v[0], int):
        return (v[0] & M32).bit_count()
    bits = np.ascontiguousarray(v[0] & M32, np.uint32).view(np.uint8)
    return np.unpackbits(bits.reshape(*np.shape(v[0]), 4), axis=-1).sum(-1).astype(np.int64)


def _cvt(i: object, v: list) -> object:
    """Between integers, and between integers and floats of 32 and 64 bits."""
    target, source = i.parts[-2], i.parts[-1]
    to_bits, from_bits = int(target[1:]), int(source[1:])
    if any(p in ("sat", "satfinite") for p in i.parts):
        raise UnsupportedOperation(f"inline PTX: {i.name}")
    scalar = not isinstance(v[0], np.ndarray)
    if source[0] == "f":
        value = _bits_to_float(v[0], from_bits)
        if target[0] == "f":
            return _float_to_bits(
                value.astype(np.float64 if to_bits == 64 else np.float32), to_bits, scalar
            )
        rounding = {"rzi": np.trunc, "rni": np.rint, "rmi": np.floor, "rpi": np.ceil}
        how = next((rounding[p] for p in i.parts if p in rounding), None)
        if how is None:
            raise UnsupportedOperation(f"inline PTX: {i.name}")
        whole = how(value).astype(np.int64)
        return _trim(int(whole) if scalar else whole, to_bits)
    value = _signed(v[0], from_bits) if source[0] == "s" else _trim(v[0], from_bits)
    if target[0] == "f":
        kind = np.float64 if to_bits == 64 else np.float32
        return _float_to_bits(np.asarray(value).astype(kind), to_bits, scalar)
    return _trim(value, to_bits)


_COMPARE: dict[str, tuple[str, Callable]] = {
    "eq": ("==", lambda a, b: a == b),
    "ne": ("!=", lambda a, b: a != b),
    "lt": ("<", lambda a, b: a < b),
    "le": ("<=", lambda a, b: a <= b),
    "gt": (">", lambda a, b: a > b),
    "ge": (">=", lambda a, b: a >= b),
    "lo": ("<", lambda a, b: a < b),
    "ls": ("<=", lambda a, b: a <= b),
    "hi": (">", lambda a, b: a > b),
    "hs": (">=", lambda a, b: a >= b),
}


def comparison(i: object, a: object, b: object) -> tuple[str, object, object, object]:
    """(symbol, predicate, both operands as compared) of a setp."""
    entry = _COMPARE.get(i.parts[1])
    if entry is None:
        raise UnsupportedOperation(f"inline PTX: {i.name}")
    if _kind(i.parts) == "f":
        a, b = _bits_to_float(a, i.width), _bits_to_float(b, i.width)
    else:
        a, b = _typed(i, a), _typed(i, b)
    return entry[0], entry[1](a, b), a, b


def evaluator(name: str) -> Callable | None:
    """What computes the instruction `name`; None if nothing does."""
    parts = name.split(".")
    if any(part in ("f16", "bf16") or part.endswith("x2") for part in parts[1:]):
        return _NARROW.get(name)
    return _EVALUATE.get(parts[0])


# Of the instructions on fp16, bf16 and e4m3 only these, with these modifiers.
_NARROW: dict[str, Callable] = {
    "mul.rn.f16x2": _mul_halves,
    "set.ne.f16x2.f16x2": _ne_halves,
    "cvt.rn.f16x2.e4m3x2": _e4m3_to_halves,
    "cvt.rn.satfinite.e4m3x2.f16x2": _halves_to_e4m3,
}
_EVALUATE: dict[str, Callable] = {
    "mov": _mov,
    "add": _add,
    "sub": _sub,
    "mul": _mul,
    "mad": _mad,
    "neg": _neg,
    "abs": _abs,
    "and": _logic(lambda a, b: a & b),
    "or": _logic(lambda a, b: a | b),
    "xor": _logic(lambda a, b: a ^ b),
    "not": _not,
    "shl": _shl,
    "shr": _shr,
    "min": _min,
    "max": _max,
    "selp": _selp,
    "prmt": _prmt,
    "lop3": _lop3,
    "bfe": _bfe,
    "cvt": _cvt,
    "cvta": _mov,
    "popc": _popc,
    "fma": _fma,
    "ex2": _unary_float(np.exp2),
    "lg2": _unary_float(np.log2),
    "sqrt": _unary_float(np.sqrt),
    "rcp": _unary_float(lambda x: np.float32(1) / x),
}
