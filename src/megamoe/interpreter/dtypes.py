"""Element types and the conversions between them.

Values live in NumPy arrays of `DType.calc`: integers as themselves, float16 and bfloat16 as float32
that hold exactly representable values, float8e4nv as its codes (uint8).  Memory holds
`DType.store`.
"""

from __future__ import annotations

import numpy as np


class DType:
    """An element type: Triton's `name`, kind ("b", "i", "u", "f", "8" for fp8, "p"), bits, memory
    and value types.
    """

    def __init__(self, name: str, kind: str, bits: int, store: type, calc: type, short: str):
        self.name, self.kind, self.short = name, kind, short
        self.primitive_bitwidth = self.int_bitwidth = self.bits = bits
        self.store, self.calc = np.dtype(store), np.dtype(calc)
        self.itemsize = max(1, bits // 8)
        self.lo = self.hi = None
        if kind in "iu":
            info = np.iinfo(calc)
            self.lo, self.hi = int(info.min), int(info.max)
        elif kind == "b":
            self.lo, self.hi = 0, 1
        self.is_integer = kind in "biu"

    def __repr__(self) -> str:
        return self.name

    @property
    def scalar(self) -> DType:
        return self

    def is_int(self) -> bool:
        return self.is_integer

    def is_floating(self) -> bool:
        return self.kind in "f8"

    def is_fp8(self) -> bool:
        return self.kind == "8"

    def is_ptr(self) -> bool:
        return self.kind == "p"

    def is_int_signed(self) -> bool:
        return self.kind == "i"

    def is_int_unsigned(self) -> bool:
        return self.kind == "u"

    def is_bf16(self) -> bool:
        return self is bfloat16

    def is_fp32(self) -> bool:
        return self is float32


class PointerType(DType):
    """Pointer to `element_ty`."""

    def __init__(self, element: DType):
        super().__init__(
            f"pointer<{element.name}>", "p", 64, np.int64, np.int64, "*" + element.short
        )
        self.element_ty = element


int1 = DType("int1", "b", 1, np.uint8, np.bool_, "i1")
int8 = DType("int8", "i", 8, np.int8, np.int8, "i8")
int16 = DType("int16", "i", 16, np.int16, np.int16, "i16")
int32 = DType("int32", "i", 32, np.int32, np.int32, "i32")
int64 = DType("int64", "i", 64, np.int64, np.int64, "i64")
uint8 = DType("uint8", "u", 8, np.uint8, np.uint8, "u8")
uint16 = DType("uint16", "u", 16, np.uint16, np.uint16, "u16")
uint32 = DType("uint32", "u", 32, np.uint32, np.uint32, "u32")
uint64 = DType("uint64", "u", 64, np.uint64, np.uint64, "u64")
float8e4nv = DType("float8e4nv", "8", 8, np.uint8, np.uint8, "fp8e4nv")
float16 = DType("float16", "f", 16, np.float16, np.float32, "fp16")
bfloat16 = DType("bfloat16", "f", 16, np.uint16, np.float32, "bf16")
float32 = DType("float32", "f", 32, np.float32, np.float32, "fp32")
float64 = DType("float64", "f", 64, np.float64, np.float64, "fp64")

ALL = (
    int1,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
    float8e4nv,
    float16,
    bfloat16,
    float32,
    float64,
)
BY_NAME = {d.name: d for d in ALL} | {d.short: d for d in ALL}
BY_NAME |= {"float8_e4m3fn": float8e4nv, "bool": int1}
_POINTERS: dict[DType, PointerType] = {}


def pointer_type(element: DType, address_space: int = 1, const: bool = False) -> PointerType:
    """The (single) pointer type to `element`."""
    if element not in _POINTERS:
        _POINTERS[element] = PointerType(element)
    return _POINTERS[element]


def as_dtype(spec: object) -> DType:
    """A `DType` from one of ours, one of Triton's, or a name such as "int32", "fp8e4nv",
    "bfloat16".
    """
    if isinstance(spec, DType):
        return spec
    if getattr(spec, "element_ty", None) is not None:
        return pointer_type(as_dtype(spec.element_ty))
    name = spec if isinstance(spec, str) else getattr(spec, "name", None)
    if name not in BY_NAME:
        raise TypeError(f"unknown element type {spec!r}; known: {', '.join(d.name for d in ALL)}")
    return BY_NAME[name]


# --- fp8 (e4m3) -----------------------------------------------------------------------------------


def _e4m3_table() -> np.ndarray:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    value[(codes & 127) == 127] = np.nan
    return np.where(codes >= 128, -value, value)


E4M3_64 = _e4m3_table()
E4M3_32 = E4M3_64.astype(np.float32)


def e4m3_encode(x: np.ndarray) -> np.ndarray:
    """Codes of fp32 `x`: nearest even, saturating to +-448 (infinity too), NaN to 0x7f, -0 kept."""
    x = np.ascontiguousarray(x, np.float32)
    bits = x.view(np.int32)
    mag = bits & 0x7FFFFFFF
    nan = mag > 0x7F800000
    # Adding 2^-9 * 2^23 aligns a small value to the subnormal grid, so that the addition rounds it.
    with np.errstate(invalid="ignore"):
        small = (mag.view(np.float32) + np.float32(16384.0)).view(np.int32) - 0x46800000
    code = ((mag + 0x7FFFF + ((mag >> 20) & 1)) >> 20) - 960
    code = np.where(mag < 0x3C800000, small, np.minimum(code, 126))
    if nan.any():
        code[nan] = 127
        return np.where(nan, 127, code | ((bits >> 24) & 0x80)).astype(np.uint8)
    code |= (bits >> 24) & 0x80
    return code.astype(np.uint8)


# --- bf16 -----------------------------------------------------------------------------------------


def bf16_round(x: np.ndarray) -> np.ndarray:
    """fp32 `x` rounded to the nearest bfloat16 (ties to even), as float32."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    out = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) & np.uint32(
        0xFFFF0000
    )
    nan = (bits & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000)
    if nan.any():
        out = np.where(nan, (bits & np.uint32(0xFFFF0000)) | np.uint32(0x400000), out)
    return out.view(np.float32)


# --- memory <-> value -----------------------------------------------------------------------------


def decode(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """Value array from an array of `dtype.store` (may alias `raw`)."""
    if dtype is bfloat16:
        return (raw.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if dtype is float16:
        return raw.astype(np.float32)
    if dtype is int1:
        return raw != 0
    return raw


def encode(value: np.ndarray, dtype: DType) -> np.ndarray:
    """Array of `dtype.store` from a value array (may alias `value`)."""
    if dtype is bfloat16:
        return (np.ascontiguousarray(value).view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    if dtype is float16:
        return value.astype(np.float16)
    if dtype is int1:
        return value.astype(np.uint8)
    return value


def to_float64(raw: np.ndarray, dtype: DType) -> np.ndarray:
    """float64 values of an array of `dtype.store`."""
    if dtype is float8e4nv:
        return E4M3_64[raw]
    return decode(raw, dtype).astype(np.float64)


def convert(value: np.ndarray, src: DType, dst: DType) -> np.ndarray:
    """Numeric conversion of a value array."""
    if src is dst:
        return value
    if src is float8e4nv:
        value, src = E4M3_32[value], float32
        if dst is float32:
            return value
    if dst is float8e4nv:
        return e4m3_encode(np.asarray(value, np.float32))
    if dst is bfloat16:
        return bf16_round(np.asarray(value, np.float32))
    if dst is float16:
        return np.asarray(value, np.float32).astype(np.float16).astype(np.float32)
    if dst is int1:
        return np.asarray(value) != 0
    if src.kind == "f" and dst.kind in "iu":
        return np.trunc(value).astype(np.int64).astype(dst.calc)
    return np.asarray(value).astype(dst.calc)


def bitcast(value: np.ndarray, src: DType, dst: DType) -> np.ndarray:
    """Same bits, other type of the same width."""
    raw = np.ascontiguousarray(encode(value, src))
    return decode(raw.view(dst.store), dst)


# --- promotion ------------------------------------------------------------------------------------

_RANK = {"b": 0, "i": 1, "u": 1, "f": 2, "8": 2}


def _integers(a: DType, b: DType) -> DType:
    if a.kind == b.kind:
        return a if a.bits >= b.bits else b
    if a.kind == "b" or b.kind == "b":
        return b if a.kind == "b" else a
    unsigned, signed = (a, b) if a.kind == "u" else (b, a)
    return unsigned if unsigned.bits >= signed.bits else signed


def promote(a: DType, b: DType, division: bool = False) -> DType:
    """Triton's common type of two tensors (`/` and `%` compute half precision in fp32)."""
    if a.kind == "f" or b.kind == "f" or a.kind == "8" or b.kind == "8":
        for wide in (float64, float32):
            if a is wide or b is wide:
                return wide
        if a is float16 or b is float16:
            return float32 if division else float16
        if a is bfloat16 or b is bfloat16:
            return float32 if division or a is not b else bfloat16
        raise TypeError(f"arithmetic on {a} and {b}: convert float8e4nv with .to(gl.float32) first")
    return _integers(a, b)


def python_type(value: object) -> DType:
    """The type that a Python number has beside another Python number."""
    if isinstance(value, bool):
        return int1
    if isinstance(value, int):
        if -(1 << 31) <= value < 1 << 31:
            return int32
        if value < 1 << 32 and value > 0:
            return uint32
        return int64 if value < 1 << 63 else uint64
    return float32


def promote_python(dtype: DType, value: object, division: bool = False) -> DType:
    """Common type of a tensor of `dtype` and a Python number: the tensor's, unless the number's
    kind is wider.
    """
    other = python_type(value)
    if _RANK[other.kind] <= _RANK[dtype.kind]:
        if division and dtype in (float16, bfloat16):
            return float32
        return dtype
    return other
