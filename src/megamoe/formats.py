"""The narrow number formats: e4m3, e2m1 and UE8M0 scales; encode, decode, quantise, pack.

One rule for every power-of-two scale of the project: the smallest s = 2^e with amax <= largest * s,
where largest is 448 (e4m3) or 6 (e2m1), found exactly from the bits of the fp32 amax, and e kept
within -126..127 so that s is a normal fp32 (UE8M0 codes 1..254). A block of zeros gets the
smallest scale, and its values stay zero.

Values are rounded to nearest, ties to even. e4m3 is the "fn" variant: no Inf, one NaN per sign.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
UE8M0_NAN = 255
UE8M0_BIAS = 127
MIN_EXPONENT = -126
SCALE_BLOCK = 32
# Below this shift an e4m3 value (at most 448) is far under half of e4m3's smallest (2^-10): it
# rounds to zero, as it would at any lower shift, while 2^shift is still a normal fp32.
_LOWEST_USEFUL_SHIFT = -40

# The largest finite value of a format as (exponent, fp32 mantissa bits): 448 = 1.75 * 2^8.
_LARGEST = {E4M3_MAX: (8, 0x600000), E2M1_MAX: (2, 0x400000)}


class Quantised(NamedTuple):
    """values and their scales; the shapes are given by the function that returns it."""

    values: torch.Tensor
    scales: torch.Tensor


class Rebased(NamedTuple):
    """values [.., K] e4m3, scale [..] fp32 (one per row), inexact: how many values were rounded."""

    values: torch.Tensor
    scale: torch.Tensor
    inexact: int


def _as_float32(x: torch.Tensor) -> torch.Tensor:
    if x.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        raise TypeError(f"expected float32, bfloat16 or float16, got {x.dtype}")
    return x.to(torch.float32)


# --- scales ------------------------------------------------------------------------------------


def power_of_two_exponent(amax: torch.Tensor, *, largest: float) -> torch.Tensor:
    """The smallest e with amax <= largest * 2^e, at least -126: int32, same shape as amax.

    amax: fp32, finite and not negative. largest: E4M3_MAX or E2M1_MAX. Integer arithmetic on the
    bits of amax, so exact for every fp32.
    """
    exponent, mantissa = _LARGEST[largest]
    bits = amax.to(torch.float32).contiguous().view(torch.int32)
    above = (bits & 0x7FFFFF) > mantissa
    e = (bits >> 23) - UE8M0_BIAS - exponent + above.to(torch.int32)
    return e.clamp_min(MIN_EXPONENT)


def power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """2^exponent as fp32, exact; exponent: int32 in -126..127."""
    return ((exponent + UE8M0_BIAS) << 23).to(torch.int32).view(torch.float32)


def decode_ue8m0(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of UE8M0 codes (uint8): 2^(code - 127), so 0 gives 2^-127, 255 gives NaN."""
    if codes.dtype != torch.uint8:
        raise TypeError(f"UE8M0 codes must be uint8, got {codes.dtype}")
    bits = codes.to(torch.int32) << 23
    # 2^-127 is subnormal (mantissa 0x400000), and an exponent field of 255 alone would be Inf.
    bits = bits.masked_fill(codes == 0, 0x400000).masked_fill(codes == UE8M0_NAN, 0x7FC00000)
    return bits.view(torch.float32)


def encode_ue8m0(scale: torch.Tensor) -> torch.Tensor:
    """UE8M0 codes (uint8) of fp32 scales that are powers of two, 2^-127..2^127, or NaN.

    Raises ValueError when a scale is none of these (nothing is rounded).
    """
    bits = scale.to(torch.float32).contiguous().view(torch.int32)
    codes = (bits >> 23).masked_fill(bits == 0x400000, 0).masked_fill(scale.isnan(), UE8M0_NAN)
    codes = (codes & 0xFF).to(torch.uint8)
    wrong = (decode_ue8m0(codes) != scale) & ~scale.isnan()
    if bool(wrong.any()):
        raise ValueError(f"scale {scale[wrong][0].item()} is not a power of two that UE8M0 holds")
    return codes


def pack_ue8m0_int32(codes: torch.Tensor) -> torch.Tensor:
    """uint8 [.., n] -> int32 [.., ceil(n/4)], code 4j + i in byte i of word j (little endian).

    Missing codes at the end are 0.
    """
    missing = -codes.shape[-1] % 4
    b = torch.nn.functional.pad(codes, (0, missing)).to(torch.int32).unflatten(-1, (-1, 4))
    return b[..., 0] | b[..., 1] << 8 | b[..., 2] << 16 | b[..., 3] << 24


def unpack_ue8m0_int32(packed: torch.Tensor, *, count: int | None = None) -> torch.Tensor:
    """int32 [.., m] -> uint8 [.., 4m], or the first count of them; undoes pack_ue8m0_int32."""
    if packed.dtype != torch.int32:
        raise TypeError(f"packed UE8M0 codes must be int32, got {packed.dtype}")
    shifts = torch.tensor([0, 8, 16, 24], dtype=torch.int32, device=packed.device)
    codes = ((packed.unsqueeze(-1) >> shifts) & 0xFF).to(torch.uint8).flatten(-2)
    return codes if count is None else codes[..., :count]


# --- e4m3 --------------------------------------------------------------------------------------


def encode_e4m3(x: torch.Tensor) -> torch.Tensor:
    """fp32/bf16/fp16 -> float8_e4m3fn, nearest even. Finite values beyond 448 become 448;

    NaN and Inf become NaN (the cast of torch saturates Inf in some versions, which would hide it).
    """
    x = _as_float32(x)
    finite = x.clamp(-E4M3_MAX, E4M3_MAX)
    return torch.where(x.isinf(), torch.nan, finite).to(torch.float8_e4m3fn)


def decode_e4m3(values: torch.Tensor) -> torch.Tensor:
    """float8_e4m3fn, or its codes as uint8, -> fp32, exact."""
    if values.dtype == torch.uint8:
        values = values.view(torch.float8_e4m3fn)
    return values.to(torch.float32)


def quantise_e4m3_blocks(
    x: torch.Tensor, *, block: int | None = SCALE_BLOCK, power_of_two_scales: bool | None = None
) -> Quantised:
    """Quantise rows of x [.., K] (fp32, bf16 or fp16) to e4m3 with one scale per block of K.

    block=32 -> scales are UE8M0 codes, uint8 [.., ceil(K/32)].
    block=128 -> fp32 [.., ceil(K/128)], amax / 448 (a power of two if power_of_two_scales).
    block=None -> fp32 [..], one power of two per row (amax / 448 if power_of_two_scales=False).
    values: float8_e4m3fn [.., K]. The last block may be short.

    NaN and Inf elements become NaN; the scale is that of the finite elements of the block, so
    nothing else is affected.
    """
    if block not in (None, 32, 128):
        raise ValueError(f"block must be 32, 128 or None (the whole row), got {block}")
    x = _as_float32(x)
    blocked = _in_blocks(x, x.shape[-1] if block is None else block)
    amax = _finite_amax(blocked)
    if power_of_two_scales is None:
        power_of_two_scales = block != 128
    if block == 32 and not power_of_two_scales:
        raise ValueError("scales of blocks of 32 are UE8M0 codes, which are powers of two")
    if power_of_two_scales:
        e = power_of_two_exponent(amax, largest=E4M3_MAX)
        scaled = blocked * power_of_two(-e).unsqueeze(-1)
        scales = (e + UE8M0_BIAS).to(torch.uint8) if block == 32 else power_of_two(e)
    else:
        scales = (amax / E4M3_MAX).clamp_min(2.0**MIN_EXPONENT)
        scaled = blocked / scales.unsqueeze(-1)
    values = encode_e4m3(scaled).flatten(-2)[..., : x.shape[-1]]
    return Quantised(values.contiguous(), scales.squeeze(-1) if block is None else scales)


def dequantise_e4m3_blocks(
    values: torch.Tensor, scales: torch.Tensor, *, block: int | None = SCALE_BLOCK
) -> torch.Tensor:
    """fp32 [.., K] of what quantise_e4m3_blocks gives (uint8 scales are taken as UE8M0 codes)."""
    scales = decode_ue8m0(scales) if scales.dtype == torch.uint8 else scales
    if block is None:
        return decode_e4m3(values) * scales.unsqueeze(-1)
    return decode_e4m3(values) * _expand(scales, block, values.shape[-1])


def rebase_x_to_token(values: torch.Tensor, codes: torch.Tensor) -> Rebased:
    """Replace the UE8M0 scale of each block of 32 by one power-of-two scale per token.

    values [.., K] e4m3, codes [.., ceil(K/32)] uint8 (codes beyond are ignored). The token's scale
    is the largest among its blocks that hold a nonzero or a NaN, 1.0 if there is none; a value v
    becomes e4m3(v * 2^(e_block - e_token)), nearest even. This is what dispatch does as it copies
    a row. A block without nonzeros must not shift anything: its exponent difference, which may be
    positive, counts as 0.
    """
    blocked = _in_blocks(decode_e4m3(values), SCALE_BLOCK)
    codes = codes[..., : blocked.shape[-2]].to(torch.int32)
    holds = (blocked != 0).any(-1)
    token = codes.masked_fill(~holds, -1).amax(-1)
    token = token.masked_fill(token < 0, UE8M0_BIAS)
    rebased, inexact = shift_e4m3(blocked, (codes - token.unsqueeze(-1)).unsqueeze(-1))
    rebased = rebased.flatten(-2)[..., : values.shape[-1]].contiguous()
    return Rebased(rebased, decode_ue8m0(token.to(torch.uint8)), inexact)


def shift_e4m3(values: torch.Tensor, shift: torch.Tensor) -> tuple[torch.Tensor, int]:
    """e4m3(values * 2^shift) and how many of them were not exact.

    values: fp32 that e4m3 holds; shift: int32, broadcastable, taken as 0 where it is positive.
    """
    factor = power_of_two(shift.clamp(_LOWEST_USEFUL_SHIFT, 0))
    wanted = values * factor
    result = encode_e4m3(wanted)
    inexact = (decode_e4m3(result) != wanted) & ~wanted.isnan()
    return result, int(inexact.sum())


def _in_blocks(x: torch.Tensor, block: int) -> torch.Tensor:
    """[.., K] -> [.., ceil(K/block), block], zeros at the end."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % block))
    return padded.unflatten(-1, (padded.shape[-1] // block, block))


def _finite_amax(blocked: torch.Tensor) -> torch.Tensor:
    magnitude = blocked.abs()
    return magnitude.masked_fill(~magnitude.isfinite(), 0.0).amax(-1)


def _expand(scales: torch.Tensor, block: int, length: int) -> torch.Tensor:
    return scales.repeat_interleave(block, dim=-1)[..., :length]


# --- e2m1 --------------------------------------------------------------------------------------


def encode_e2m1(x: torch.Tensor) -> torch.Tensor:
    """fp32 -> e2m1 codes (uint8, 0..15): nearest, ties to the even code, beyond 6 becomes 6.

    Bit 3 is the sign. What rounds to zero is +0 (code 0), also when it was negative. NaN has no
    code: it becomes 0, so a caller must mark it in the scale, as quantise_e2m1 does.
    """
    magnitude = x.abs()
    code = torch.zeros_like(magnitude, dtype=torch.uint8)
    for index in range(1, len(E2M1_VALUES)):
        midpoint = (E2M1_VALUES[index - 1] + E2M1_VALUES[index]) / 2
        # A tie goes to the neighbour with the even code: up if index is even.
        code += magnitude >= midpoint if index % 2 == 0 else magnitude > midpoint
    return torch.where((x < 0) & (code > 0), code | 8, code)


def decode_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """fp32 values of e2m1 codes (uint8, 0..15), exact; code 8 is -0."""
    table = torch.tensor(E2M1_VALUES + tuple(-value for value in E2M1_VALUES), device=codes.device)
    return table[codes.to(torch.int32)]


def pack_e2m1(codes: torch.Tensor) -> torch.Tensor:
    """uint8 codes [.., K], K even -> uint8 [.., K/2]: element 2i in the low nibble of byte i."""
    return codes[..., 0::2] | codes[..., 1::2] << 4


def unpack_e2m1(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [.., K/2] -> uint8 codes [.., K]; undoes pack_e2m1."""
    return torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)


def quantise_e2m1(x: torch.Tensor) -> Quantised:
    """Quantise rows of x [.., K] (fp32, bf16 or fp16; K even) to e2m1 with UE8M0 scales per 32.

    values: packed uint8 [.., K/2] (see pack_e2m1); scales: codes uint8 [.., ceil(K/32)].
    e2m1 has no NaN: a block that holds a NaN or an Inf gets scale code 255 (NaN).
    """
    x = _as_float32(x)
    if x.shape[-1] % 2:
        raise ValueError(f"the last dimension must be even to pack two codes a byte, got {x.shape}")
    blocked = _in_blocks(x, SCALE_BLOCK)
    e = power_of_two_exponent(_finite_amax(blocked), largest=E2M1_MAX)
    codes = encode_e2m1(blocked * power_of_two(-e).unsqueeze(-1)).flatten(-2)[..., : x.shape[-1]]
    scales = (e + UE8M0_BIAS).to(torch.uint8)
    scales = scales.masked_fill(~blocked.isfinite().all(-1), UE8M0_NAN)
    return Quantised(pack_e2m1(codes), scales)


def dequantise_e2m1(packed: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """fp32 [.., K] of packed e2m1 codes [.., K/2] and UE8M0 codes [.., ceil(K/32)]."""
    values = decode_e2m1(unpack_e2m1(packed))
    return values * _expand(decode_ue8m0(scales), SCALE_BLOCK, values.shape[-1])


# --- x on the wire -----------------------------------------------------------------------------


def quantise_x(x: torch.Tensor, *, x_scales: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    """x [t, H] in the format that MoEConfig.x_scales names: (values, x_scale of the public call).

    "none": (x, None). "token": e4m3, fp32 [t, 1] powers of two. "ue8m0_32": e4m3, int32
    [t, ceil(H/128)]. "block128": e4m3, fp32 [t, ceil(H/128)], amax / 448.
    """
    if x_scales == "none":
        return x, None
    if x_scales == "token":
        values, scales = quantise_e4m3_blocks(x, block=None)
        return values, scales.unsqueeze(-1)
    if x_scales == "ue8m0_32":
        values, codes = quantise_e4m3_blocks(x, block=32)
        return values, pack_ue8m0_int32(codes)
    if x_scales == "block128":
        return quantise_e4m3_blocks(x, block=128)
    raise ValueError(f"x_scales must be none, token, ue8m0_32 or block128, got {x_scales!r}")


def dequantise_x(
    values: torch.Tensor, x_scale: torch.Tensor | None, *, x_scales: str
) -> torch.Tensor:
    """fp32 [t, H] of what the kernel multiplies: values and x_scale as quantise_x gives them.

    "ue8m0_32" goes through rebase_x_to_token, so that what dispatch rounds is rounded here too.
    """
    if x_scales == "none":
        return values.to(torch.float32)
    if x_scales == "token":
        return decode_e4m3(values) * x_scale.reshape(-1, 1)
    if x_scales == "ue8m0_32":
        rebased = rebase_x_to_token(values, unpack_ue8m0_int32(x_scale))
        return decode_e4m3(rebased.values) * rebased.scale.unsqueeze(-1)
    if x_scales == "block128":
        return dequantise_e4m3_blocks(values, x_scale, block=128)
    raise ValueError(f"x_scales must be none, token, ue8m0_32 or block128, got {x_scales!r}")
