"""Expert weights in the layout that the kernel reads, packed from those of a checkpoint.

Everything here works one expert at a time, and on 128 rows at a time within it.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import torch

from megamoe import formats
from megamoe.checkpoint import (
    BLOCK,
    KIND_OF_RECIPE,
    CheckpointExperts,
    WeightsError,
    quantise_experts,
)
from megamoe.config import MoEConfig

__all__ = [
    "CheckpointExperts",
    "KernelWeights",
    "WeightsError",
    "pack_kernel_mxfp4",
    "pack_weights",
    "quantise_experts",
    "unpack_kernel_mxfp4",
]

INTERLEAVE = 8
# An e2m1 value v is handed to the tensor core as the e4m3 value v * 2^(d - 4), 0 <= d <= 10.
MXFP4_OFFSET_MAX = 10
MXFP4_OFFSET_BIAS = 4


@dataclass(frozen=True, kw_only=True)
class KernelWeights:
    """One rank's experts as the kernel reads them; Er experts, H and I padded to Hp and Ip.

    w1 [Er * 2Ip, Hp], w2 [Er * Hp, Ip]: bfloat16, float8_e4m3fn, or for mxfp4 uint8 with half the
    columns (see pack_kernel_mxfp4). w1 interleaves gate and up by 8: row 16j + i is gate row
    8j + i, row 16j + 8 + i is up row 8j + i (0 <= i < 8). Padding is zero, its scales are 1.

    w1_scale, w2_scale, fp32. fp8, mxfp4: one power of two per row, [Er, 2Ip] and [Er, Hp].
    fp8_block: [Er, Hp/128, 2Ip] and [Er, Ip/128, Hp], (128 of K, row). bf16: None.

    w1_offset, w2_offset, mxfp4 only: int32 [Er, Hp/128, 2Ip] and [Er, Ip/128, Hp]. Byte j (little
    endian) of word b of a row is the exponent offset d of k = 128b + 32j .. + 31; a code of value v
    stands for v * 2^(d - 4) times the row's scale, 0 <= d <= 10.

    inexact: how many weights the single scale per row could not represent exactly.
    """

    config: MoEConfig
    rank: int
    w1: torch.Tensor
    w2: torch.Tensor
    w1_scale: torch.Tensor | None = None
    w2_scale: torch.Tensor | None = None
    w1_offset: torch.Tensor | None = None
    w2_offset: torch.Tensor | None = None
    inexact: int = 0

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors by field name, without those that the recipe does not use."""
        values = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in values if isinstance(value, torch.Tensor)}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def dequantise(self, local_expert: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate [I, H], up [I, H], down [H, I]), fp32, of what the kernel multiplies."""
        hidden, intermediate = self.config.hidden, self.config.intermediate
        both = self._matrix("w1", local_expert)[:, :hidden]
        gate, up = both.unflatten(0, (-1, 2, INTERLEAVE)).unbind(1)
        down = self._matrix("w2", local_expert)[:hidden, :intermediate]
        return gate.flatten(0, 1)[:intermediate], up.flatten(0, 1)[:intermediate], down

    def _matrix(self, name: str, expert: int) -> torch.Tensor:
        weight = getattr(self, name).unflatten(0, (self.config.experts_per_rank, -1))[expert]
        recipe = self.config.recipe
        if recipe == "bf16":
            return weight.to(torch.float32)
        scale = getattr(self, name + "_scale")[expert]
        if recipe == "fp8_block":
            return formats.decode_e4m3(weight) * scale.T.repeat_interleave(BLOCK, dim=1)
        if recipe == "fp8":
            return formats.decode_e4m3(weight) * scale.unsqueeze(1)
        offsets = formats.unpack_ue8m0_int32(getattr(self, name + "_offset")[expert].T)
        exponents = offsets.to(torch.int32).repeat_interleave(formats.SCALE_BLOCK, dim=1)
        values = formats.decode_e2m1(unpack_kernel_mxfp4(weight))
        return values * formats.power_of_two(exponents - MXFP4_OFFSET_BIAS) * scale.unsqueeze(1)


def pack_weights(
    config: MoEConfig,
    checkpoint: CheckpointExperts,
    rank: int,
    *,
    device: torch.device | str = "cpu",
) -> KernelWeights:
    """One rank's experts in the kernel's form, on `device`.

    The result is allocated once and filled expert by expert, so the memory needed beside it is the
    one expert that the checkpoint loads and the temporaries of 128 rows.
    Raises WeightsError: wrong kind or shapes, scales that the recipe cannot use.
    """
    _check_fits(config, checkpoint, rank)
    packed = _allocate(config, rank, device)
    inexact = 0
    for local in range(config.experts_per_rank):
        index = rank * config.experts_per_rank + local
        expert = checkpoint.expert(index)
        for name, (weight, scale) in expert.projections().items():
            target = _Target(packed, local, name)
            for start in range(0, weight.shape[0], BLOCK):
                where = _Where(index, name, start)
                chunk = weight[start : start + BLOCK]
                inexact += target.write(start, _convert(config.recipe, chunk, scale, where))
    return KernelWeights(**(vars(packed) | {"inexact": inexact}))


def _check_fits(config: MoEConfig, checkpoint: CheckpointExperts, rank: int) -> None:
    if not 0 <= rank < config.ranks:
        raise WeightsError(f"rank {rank} is not within 0..{config.ranks - 1}")
    for name in ("experts", "hidden", "intermediate"):
        has, wants = getattr(checkpoint, name), getattr(config, name)
        if has != wants:
            raise WeightsError(f"the checkpoint has {name} {has}, the configuration {wants}")
    kind = KIND_OF_RECIPE[config.recipe]
    if checkpoint.kind != kind:
        hint = f": use quantise_experts(checkpoint, {config.recipe!r})"
        raise WeightsError(
            f"recipe {config.recipe} needs experts of kind {kind}, got {checkpoint.kind}"
            + (hint if checkpoint.kind == "bf16" else "")
        )


def _allocate(config: MoEConfig, rank: int, device: torch.device | str) -> KernelWeights:
    experts, recipe = config.experts_per_rank, config.recipe
    kinds = {"bf16": torch.bfloat16, "mxfp4": torch.uint8}
    dtype = kinds.get(recipe, torch.float8_e4m3fn)
    sizes = {
        "w1": (2 * config.padded_intermediate, config.padded_hidden),
        "w2": (config.padded_hidden, config.padded_intermediate),
    }
    tensors = {}
    for name, (rows, columns) in sizes.items():
        stored = columns // 2 if recipe == "mxfp4" else columns
        tensors[name] = torch.zeros(experts * rows, stored, dtype=dtype, device=device)
        if recipe == "bf16":
            continue
        blocks = (columns // BLOCK,) if recipe == "fp8_block" else ()
        tensors[name + "_scale"] = torch.ones(experts, *blocks, rows, device=device)
        if recipe == "mxfp4":
            tensors[name + "_offset"] = torch.zeros(
                experts, columns // BLOCK, rows, dtype=torch.int32, device=device
            )
    return KernelWeights(config=config, rank=rank, **tensors)


class _Where(NamedTuple):
    """For messages: which rows are being converted."""

    expert: int
    projection: str
    first_row: int


class _Rows(NamedTuple):
    """Converted rows [n, ..] of one matrix; K is not padded yet, but for mxfp4 to 256."""

    values: torch.Tensor
    scale: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    inexact: int = 0


class _Target:
    """Where the rows of one projection of one expert go in the kernel's tensors."""

    def __init__(self, packed: KernelWeights, local_expert: int, projection: str) -> None:
        self.half = {"gate": 0, "up": 1, "down": None}[projection]
        name = "w2" if projection == "down" else "w1"
        experts = packed.config.experts_per_rank
        self.weight = _as_uint8(getattr(packed, name).unflatten(0, (experts, -1))[local_expert])
        scale, offset = getattr(packed, name + "_scale"), getattr(packed, name + "_offset")
        # Rows first: they are the last axis of the scales and offsets.
        self.scale = None if scale is None else scale[local_expert].movedim(-1, 0)
        self.offset = None if offset is None else offset[local_expert].movedim(-1, 0)

    def write(self, start: int, rows: _Rows) -> int:
        self._copy(self.weight, start, _as_uint8(rows.values))
        if rows.scale is not None:
            self._copy(self.scale, start, rows.scale)
        if rows.offset is not None:
            self._copy(self.offset, start, rows.offset)
        return rows.inexact

    def _copy(self, target: torch.Tensor, start: int, rows: torch.Tensor) -> None:
        stop = start + rows.shape[0]
        if target.dim() > 1:
            target = target[:, : rows.shape[1]]
        if self.half is None:
            target[start:stop] = rows
            return
        by_eight = target.unflatten(0, (-1, 2, INTERLEAVE))[:, self.half]
        by_eight[start // INTERLEAVE : stop // INTERLEAVE] = rows.unflatten(0, (-1, INTERLEAVE))


def _as_uint8(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as uint8 where an element is one byte: copies of float8 are not everywhere."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def _convert(recipe: str, rows: torch.Tensor, scale: torch.Tensor | None, where: _Where) -> _Rows:
    if recipe == "bf16":
        return _Rows(rows)
    if recipe == "mxfp4":
        return _mxfp4_rows(rows, scale[where.first_row : where.first_row + BLOCK], where)
    blocks = scale[where.first_row // BLOCK]
    if recipe == "fp8_block":
        return _Rows(rows, blocks.expand(rows.shape[0], -1))
    return _fp8_rows(rows, blocks, where)


def _fp8_rows(rows: torch.Tensor, scale: torch.Tensor, where: _Where) -> _Rows:
    """One scale per row instead of one per 128 of K (scale [ceil(K/128)]), all powers of two."""
    columns = rows.shape[1]
    padded = torch.nn.functional.pad(formats.decode_e4m3(rows), (0, -columns % BLOCK))
    blocked = padded.unflatten(1, (-1, BLOCK))
    holds = (blocked != 0).any(-1)
    bits = scale.contiguous().view(torch.int32)
    bad = ((bits <= 0) | (bits >= 0x7F800000) | (bits & 0x7FFFFF != 0)) & holds.any(0)
    if bool(bad.any()):
        block = int(bad.nonzero()[0])
        raise WeightsError(
            f"the {where.projection} scale of expert {where.expert}, block "
            f"[{where.first_row // BLOCK}, {block}] is {scale[block].item()}, not a power of two: "
            "recipe fp8 needs powers of two, use recipe fp8_block for these weights"
        )
    exponents = (bits >> 23) - formats.UE8M0_BIAS
    lowest = formats.MIN_EXPONENT - 1
    largest = exponents.expand(holds.shape).masked_fill(~holds, lowest).amax(1)
    row = largest.masked_fill(largest == lowest, 0)
    shift = (exponents - row.unsqueeze(1)).unsqueeze(-1)
    values, inexact = formats.shift_e4m3(blocked, shift)
    values = values.flatten(1)[:, :columns]
    return _Rows(values, formats.power_of_two(row), inexact=inexact)


def _mxfp4_rows(rows: torch.Tensor, scale: torch.Tensor, where: _Where) -> _Rows:
    """One scale per row and an offset per 32 of K instead of a UE8M0 code per 32 of K."""
    missing = scale == formats.UE8M0_NAN
    if bool(missing.any()):
        row, block = missing.nonzero()[0].tolist()
        raise WeightsError(
            f"the {where.projection} scale of expert {where.expert}, row {where.first_row + row}, "
            f"block {block} is NaN (UE8M0 code 255): these weights are damaged"
        )
    codes = formats.unpack_e2m1(rows)
    codes = torch.nn.functional.pad(codes, (0, -codes.shape[1] % 256))
    blocked = codes.unflatten(1, (-1, formats.SCALE_BLOCK))
    exponents = torch.nn.functional.pad(scale, (0, blocked.shape[1] - scale.shape[1]))
    exponents = exponents.to(torch.int32) - formats.UE8M0_BIAS
    holds = (blocked & 7 != 0).any(-1)
    lowest = -formats.UE8M0_BIAS - 1
    largest = exponents.masked_fill(~holds, lowest).amax(1)
    zero = largest == lowest
    # A scale below 2^-126 would be subnormal, which a GPU may flush to zero.
    top = MXFP4_OFFSET_MAX - MXFP4_OFFSET_BIAS
    row = (largest - top).clamp_min(formats.MIN_EXPONENT).masked_fill(zero, 0)
    wanted = (exponents - row.unsqueeze(1) + MXFP4_OFFSET_BIAS).masked_fill(~holds, 0)
    codes, inexact = _lower_codes(blocked, wanted)
    offset = formats.pack_ue8m0_int32(wanted.clamp_min(0).to(torch.uint8))
    return _Rows(pack_kernel_mxfp4(codes.flatten(1)), formats.power_of_two(row), offset, inexact)


def _lower_codes(blocked: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, int]:
    """Requantise the blocks [n, b, 32] of e2m1 codes whose offset [n, b] would be negative."""
    low = wanted < 0
    if not bool(low.any()):
        return blocked, 0
    # A shift of -5 already takes 6 under half of 0.5: lower ones give the same zeros.
    shift = wanted[low].clamp_min(-8).unsqueeze(-1)
    exact = formats.decode_e2m1(blocked[low]) * formats.power_of_two(shift)
    codes = blocked.clone()
    codes[low] = formats.encode_e2m1(exact)
    return codes, int((formats.decode_e2m1(codes[low]) != exact).sum())


# --- packing of mxfp4 for the kernel -----------------------------------------------------------

# Bit positions in a 32-bit word of the four codes k = 64j + 4c + i ("low") and the four codes
# k = 64j + 32 + 4c + i ("high"): the magnitudes of all eight, and signs where an and-mask leaves
# them in the sign bits of four e4m3 bytes (the high ones after a shift by 4).
_LOW_MAGNITUDE, _LOW_SIGN = (0, 4, 8, 12), (7, 15, 23, 31)
_HIGH_MAGNITUDE, _HIGH_SIGN = (16, 20, 24, 28), (3, 11, 19, 27)
_HALVES = ((_LOW_MAGNITUDE, _LOW_SIGN), (_HIGH_MAGNITUDE, _HIGH_SIGN))


def pack_kernel_mxfp4(codes: torch.Tensor) -> torch.Tensor:
    """e2m1 codes uint8 [.., K], K a multiple of 64 -> bytes uint8 [.., K/2] in the kernel's order.

    32 bytes hold k = 64j .. 64j + 63 as eight little-endian words; word c holds k = 64j + 4c + i in
    its low half (magnitudes at bits 4i, signs at bits 8i + 7) and k = 64j + 32 + 4c + i in its
    high half (magnitudes at bits 16 + 4i, signs at bits 8i + 3), i = 0..3.
    """
    grouped = codes.to(torch.int32).unflatten(-1, (-1, 2, 8, 4))
    words = torch.zeros_like(grouped[..., 0, :, 0])
    for half, (magnitudes, signs) in enumerate(_HALVES):
        for i in range(4):
            code = grouped[..., half, :, i]
            words |= (code & 7) << magnitudes[i] | (code >> 3) << signs[i]
    return words.view(torch.uint8).flatten(-2)


def unpack_kernel_mxfp4(packed: torch.Tensor) -> torch.Tensor:
    """uint8 [.., K/2] -> e2m1 codes uint8 [.., K]; undoes pack_kernel_mxfp4."""
    words = packed.contiguous().view(torch.int32).unflatten(-1, (-1, 8))
    codes = [
        [words >> magnitudes[i] & 7 | (words >> signs[i] & 1) << 3 for i in range(4)]
        for magnitudes, signs in _HALVES
    ]
    halves = [torch.stack(half, dim=-1).flatten(-2) for half in codes]
    return torch.stack(halves, dim=-2).flatten(-3).to(torch.uint8)
