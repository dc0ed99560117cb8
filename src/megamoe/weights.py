"""Expert weights: from the layouts of checkpoints to the layout that the kernel reads.

A checkpoint's experts are one of three kinds, each with matrices gate [I, H], up [I, H] and
down [H, I] (y = down @ (silu(gate x) * up x)):

  bf16    bfloat16
  fp8     float8_e4m3fn, with one fp32 scale per 128 x 128 block: [ceil(N/128), ceil(K/128)]
  mxfp4   e2m1 codes, two a byte, low nibble first: uint8 [N, K/2], with one UE8M0 code per
          (row, 32 of K): uint8 [N, ceil(K/32)]

Everything here works one expert at a time, and on 128 rows at a time within it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import NamedTuple

import torch

from megamoe import formats
from megamoe.config import MoEConfig

KINDS = ("bf16", "fp8", "mxfp4")
LAYOUTS = ("halves", "interleaved")
KIND_OF_RECIPE = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "mxfp4": "mxfp4"}
BLOCK = 128
INTERLEAVE = 8
# An e2m1 value v is handed to the tensor core as the e4m3 value v * 2^(d - 4), 0 <= d <= 10.
MXFP4_OFFSET_MAX = 10
MXFP4_OFFSET_BIAS = 4

Matrices = Sequence[torch.Tensor] | torch.Tensor


class WeightsError(ValueError):
    """Weights that cannot be used as they are; the message says where and what to do."""


# --- checkpoint form ---------------------------------------------------------------------------


class ExpertWeights(NamedTuple):
    """One expert in checkpoint form; see the head of this file for shapes and dtypes."""

    kind: str
    gate: torch.Tensor
    up: torch.Tensor
    down: torch.Tensor
    gate_scale: torch.Tensor | None = None
    up_scale: torch.Tensor | None = None
    down_scale: torch.Tensor | None = None

    def projections(self) -> dict[str, tuple[torch.Tensor, torch.Tensor | None]]:
        """{"gate": (weight, scale or None), "up": .., "down": ..}"""
        return {
            "gate": (self.gate, self.gate_scale),
            "up": (self.up, self.up_scale),
            "down": (self.down, self.down_scale),
        }


@dataclass(frozen=True, kw_only=True)
class CheckpointExperts:
    """All routed experts of one layer in checkpoint form, each loaded when it is asked for."""

    kind: str
    experts: int
    hidden: int
    intermediate: int
    load: Callable[[int], ExpertWeights]

    def expert(self, index: int) -> ExpertWeights:
        """Expert `index` of the whole layer, checked against the shapes of the layer."""
        if not 0 <= index < self.experts:
            raise WeightsError(f"expert {index} is not within 0..{self.experts - 1}")
        expert = self.load(index)
        self._check(index, expert)
        return expert

    def dequantise(self, index: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(gate [I, H], up [I, H], down [H, I]) of one expert, fp32."""
        return dequantise(self.expert(index))

    def _check(self, index: int, expert: ExpertWeights) -> None:
        sizes = {
            "gate": (self.intermediate, self.hidden),
            "up": (self.intermediate, self.hidden),
            "down": (self.hidden, self.intermediate),
        }
        for name, (weight, scale) in expert.projections().items():
            where = f"expert {index}: {name}"
            kind = _kind_of(weight, where)
            if kind != self.kind:
                raise WeightsError(f"{where} is {kind}, but the layer is {self.kind}")
            rows, columns = sizes[name]
            packed = columns // 2 if kind == "mxfp4" else columns
            _check_shape(where, weight, (rows, packed))
            if kind == "bf16" and scale is not None:
                raise WeightsError(f"{where} is bf16 and must not have a scale")
            if kind == "fp8":
                blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
                _check_scale(where, scale, blocks, torch.float32)
            if kind == "mxfp4":
                blocks = (rows, -(-columns // formats.SCALE_BLOCK))
                _check_scale(where, scale, blocks, torch.uint8)

    @classmethod
    def from_per_expert(
        cls,
        *,
        gate_proj: Matrices,
        up_proj: Matrices,
        down_proj: Matrices,
        gate_scale: Matrices | None = None,
        up_scale: Matrices | None = None,
        down_scale: Matrices | None = None,
    ) -> CheckpointExperts:
        """One matrix per expert and projection (a list, or a tensor stacked along experts).

        The kind follows from the dtype: bfloat16, float8_e4m3fn, or uint8/int8 (mxfp4).
        """
        given = (gate_proj, up_proj, down_proj, gate_scale, up_scale, down_scale)
        counts = {len(matrices) for matrices in given if matrices is not None}
        if len(counts) != 1 or counts == {0}:
            raise WeightsError(
                "gate_proj, up_proj, down_proj and their scales must have the same number of "
                f"experts, got {sorted(counts)}"
            )
        kind = _kind_of(gate_proj[0], "gate_proj[0]")

        def load(index: int) -> ExpertWeights:
            tensors = [None if m is None else m[index] for m in given]
            return _canonical(ExpertWeights(kind, *tensors))

        return cls._checked(load, kind, counts.pop())

    @classmethod
    def from_fused(
        cls,
        *,
        gate_up: Matrices,
        down: Matrices,
        layout: str,
        gate_up_scale: Matrices | None = None,
        down_scale: Matrices | None = None,
        transposed: bool = False,
    ) -> CheckpointExperts:
        """gate and up of an expert in one matrix gate_up [2I, H].

        layout: "halves" (rows g0 g1 .. u0 u1 ..) or "interleaved" (rows g0 u0 g1 u1 ..). Nothing
        in the tensors tells the two apart, so it has to be named (see diagnose_gate_up).
        transposed: the bf16 matrices are stored [H, 2I] and [I, H].
        """
        if layout not in LAYOUTS:
            raise WeightsError(f"layout must be {' or '.join(LAYOUTS)}, got {layout!r}")
        if len(gate_up) != len(down) or not len(gate_up):
            raise WeightsError(f"{len(gate_up)} gate_up matrices, but {len(down)} down matrices")
        kind = _kind_of(gate_up[0], "gate_up[0]")
        if transposed and kind != "bf16":
            raise WeightsError(f"transposed is only possible for bf16 matrices, not for {kind}")

        def load(index: int) -> ExpertWeights:
            both, last = gate_up[index], down[index]
            if transposed:
                both, last = both.T, last.T
            gate, up = _split_rows(both, layout)
            scales = (None, None)
            if gate_up_scale is not None:
                scales = _split_scale(gate_up_scale[index], kind, layout, gate.shape[0])
            last_scale = None if down_scale is None else down_scale[index]
            return _canonical(ExpertWeights(kind, gate, up, last, *scales, last_scale))

        return cls._checked(load, kind, len(gate_up))

    @classmethod
    def from_safetensors(
        cls,
        model_dir: str | Path,
        layer: int,
        *,
        layout: str | None = None,
        transposed: bool = False,
        round_to_bf16: bool = False,
    ) -> CheckpointExperts:
        """The routed experts of one layer of a Hugging Face model folder, read when asked for.

        Understood under any prefix that ends in `layers.L.`: mlp.experts.E.{gate,up,down}_proj
        .weight (with .weight_scale_inv for e4m3), block_sparse_moe.experts.E.{w1,w3,w2}.weight
        (gate, up, down), and the fused mlp.experts.gate_up_proj / down_proj, for which layout
        (and transposed) must be given as for from_fused. config.json says how many experts there
        are. round_to_bf16 allows float32 or float16 weights, which are rounded.
        """
        files = _ModelFiles(Path(model_dir))
        names = _LayerNames.find(files, layer)
        experts = files.expert_count()

        def bf16(weight: torch.Tensor) -> torch.Tensor:
            wide = weight.dtype in (torch.float32, torch.float16)
            return weight.to(torch.bfloat16) if wide and round_to_bf16 else weight

        if names.fused:
            gate_up, down = (
                _Lazy(experts, lambda e, n=n: bf16(files.row(n, e))) for n in names.fused
            )
            for name in names.fused:
                files.check_rows(name, experts)
            if layout is None:
                raise WeightsError(
                    f"{names.fused[0]} holds gate and up fused, and nothing in it tells how: "
                    f"pass layout={' or layout='.join(repr(name) for name in LAYOUTS)}"
                )
            return cls.from_fused(gate_up=gate_up, down=down, layout=layout, transposed=transposed)
        scaled = names.scale(0, 0) in files.where
        files.require([names.weight(e, p) for e in range(experts) for p in range(3)])
        if scaled:
            files.require([names.scale(e, p) for e in range(experts) for p in range(3)])
        weights = [
            _Lazy(experts, lambda e, p=p: bf16(files.tensor(names.weight(e, p)))) for p in range(3)
        ]
        scales = [
            _Lazy(experts, lambda e, p=p: files.tensor(names.scale(e, p))) if scaled else None
            for p in range(3)
        ]
        return cls.from_per_expert(
            gate_proj=weights[0],
            up_proj=weights[1],
            down_proj=weights[2],
            gate_scale=scales[0],
            up_scale=scales[1],
            down_scale=scales[2],
        )

    @classmethod
    def _checked(
        cls, load: Callable[[int], ExpertWeights], kind: str, experts: int
    ) -> CheckpointExperts:
        first = load(0)
        if first.gate.dim() != 2:
            raise WeightsError(f"a gate matrix must have shape [I, H], got {first.gate.shape}")
        intermediate, columns = first.gate.shape
        hidden = columns * 2 if kind == "mxfp4" else columns
        checkpoint = cls(
            kind=kind, experts=experts, hidden=hidden, intermediate=intermediate, load=load
        )
        checkpoint._check(0, first)
        return checkpoint


def _kind_of(weight: torch.Tensor, where: str) -> str:
    kinds = {torch.bfloat16: "bf16", torch.float8_e4m3fn: "fp8"}
    kinds |= {torch.uint8: "mxfp4", torch.int8: "mxfp4"}
    if weight.dtype not in kinds:
        raise WeightsError(
            f"{where} is {weight.dtype}: allowed are bfloat16, float8_e4m3fn and uint8 (packed "
            "e2m1); convert other types with .to(torch.bfloat16)"
        )
    return kinds[weight.dtype]


def _check_shape(where: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise WeightsError(f"{where} has shape {list(tensor.shape)}, expected {list(shape)}")


def _check_scale(
    where: str, scale: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    if scale is None:
        raise WeightsError(f"{where} has no scale; expected {dtype} of shape {list(shape)}")
    if scale.dtype != dtype:
        raise WeightsError(f"the scale of {where} is {scale.dtype}, expected {dtype}")
    _check_shape(f"the scale of {where}", scale, shape)


def _canonical(expert: ExpertWeights) -> ExpertWeights:
    """int8 codes as uint8, scales as uint8 (mxfp4) or fp32 (fp8); nothing is rounded."""
    weights = {name: weight for name, (weight, _) in expert.projections().items()}
    if expert.kind == "mxfp4":
        weights = {name: weight.view(torch.uint8) for name, weight in weights.items()}
    scales = {
        name + "_scale": _canonical_scale(expert.kind, scale)
        for name, (_, scale) in expert.projections().items()
    }
    return expert._replace(**weights, **scales)


def _canonical_scale(kind: str, scale: torch.Tensor | None) -> torch.Tensor | None:
    if scale is None:
        return None
    if kind == "fp8":
        if scale.dtype == torch.float8_e8m0fnu:
            return formats.decode_ue8m0(scale.view(torch.uint8))
        narrow = scale.dtype in (torch.bfloat16, torch.float16)
        return scale.to(torch.float32) if narrow else scale
    one_byte = scale.dtype in (torch.int8, torch.float8_e8m0fnu)
    return scale.view(torch.uint8) if one_byte else scale


def _split_rows(both: torch.Tensor, layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    if both.shape[0] % 2:
        raise WeightsError(f"a fused gate/up matrix must have an even number of rows: {both.shape}")
    half = both.shape[0] // 2
    return (both[:half], both[half:]) if layout == "halves" else (both[0::2], both[1::2])


def _split_scale(
    scale: torch.Tensor, kind: str, layout: str, intermediate: int
) -> tuple[torch.Tensor, torch.Tensor]:
    if kind == "fp8" and (layout != "halves" or intermediate % BLOCK):
        raise WeightsError(
            "128 x 128 scale blocks of a fused matrix hold gate and up rows together unless the "
            f"layout is halves and I is a multiple of 128 (layout {layout}, I = {intermediate}): "
            "quantise gate and up apart"
        )
    return _split_rows(scale, layout)


class _Lazy(Sequence):
    """A sequence of tensors that are read when they are indexed."""

    def __init__(self, count: int, read: Callable[[int], torch.Tensor]) -> None:
        self.count = count
        self.read = read

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.read(index)


# --- model folders -----------------------------------------------------------------------------


class _ModelFiles:
    """Which file of a model folder holds which tensor, and reading them one by one."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        self.folder = folder
        self.open = safe_open
        self.handles: dict[str, object] = {}
        self.where = self._index()

    def _index(self) -> dict[str, str]:
        index = self.folder / "model.safetensors.index.json"
        if index.is_file():
            return json.loads(index.read_text())["weight_map"]
        files = sorted(path.name for path in self.folder.glob("*.safetensors"))
        if not files:
            raise WeightsError(f"{self.folder} holds no .safetensors file")
        return {name: file for file in files for name in self._handle(file).keys()}

    def _handle(self, file: str):
        if file not in self.handles:
            self.handles[file] = self.open(str(self.folder / file), framework="pt")
        return self.handles[file]

    def tensor(self, name: str) -> torch.Tensor:
        return self._handle(self.where[name]).get_tensor(name)

    def row(self, name: str, index: int) -> torch.Tensor:
        return self._handle(self.where[name]).get_slice(name)[index]

    def check_rows(self, name: str, count: int) -> None:
        shape = self._handle(self.where[name]).get_slice(name).get_shape()
        if len(shape) != 3 or shape[0] != count:
            raise WeightsError(f"{name} has shape {shape}, expected [{count} experts, .., ..]")

    def require(self, names: list[str]) -> None:
        missing = [name for name in names if name not in self.where]
        if missing:
            raise WeightsError(f"{len(missing)} tensors are missing, the first is {missing[0]}")

    def expert_count(self) -> int:
        path = self.folder / "config.json"
        if not path.is_file():
            raise WeightsError(f"{path} is missing; it says how many experts there are")
        config = json.loads(path.read_text())
        keys = ("num_experts", "num_local_experts", "n_routed_experts")
        for level in (config, config.get("text_config") or {}):
            for key in keys:
                if level.get(key) is not None:
                    return int(level[key])
        raise WeightsError(f"{path} has none of {', '.join(keys)}")


@dataclass(frozen=True)
class _LayerNames:
    """Names of one layer's expert tensors: those of a matrix per expert, or the two fused ones."""

    prefix: str
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    fused: tuple[str, str] | None = None

    def weight(self, expert: int, projection: int) -> str:
        return f"{self.prefix}{expert}.{self.projections[projection]}.weight"

    def scale(self, expert: int, projection: int) -> str:
        return self.weight(expert, projection) + "_scale_inv"

    @classmethod
    def find_all(cls, files: _ModelFiles) -> dict[int, _LayerNames]:
        """Layer number -> names, for every layer that has experts under known names."""
        per_expert = {
            r"mlp\.experts\.(?=0\.gate_proj\.weight)": ("gate_proj", "up_proj", "down_proj"),
            r"block_sparse_moe\.experts\.(?=0\.w1\.weight)": ("w1", "w3", "w2"),
            r"mlp\.experts\.(?=gate_up_proj$)": None,
        }
        found = {}
        for tail, projections in per_expert.items():
            pattern = re.compile(rf"(?:.*\.)?layers\.(\d+)\.{tail}")
            for match in filter(None, map(pattern.match, files.where)):
                prefix = match[0]
                if projections is None:
                    names = cls(prefix, fused=(prefix + "gate_up_proj", prefix + "down_proj"))
                else:
                    names = cls(prefix, projections)
                found[int(match[1])] = names
        return found

    @classmethod
    def find(cls, files: _ModelFiles, layer: int) -> _LayerNames:
        found = cls.find_all(files)
        if layer not in found:
            layers = ", ".join(map(str, sorted(found))) or "none"
            raise WeightsError(
                f"layer {layer} has no experts under a known name in {files.folder}; layers with "
                f"experts: {layers}"
            )
        if found[layer].fused:
            files.require(list(found[layer].fused))
        return found[layer]


def moe_layers(model_dir: str | Path) -> list[int]:
    """The layers of a model folder whose experts from_safetensors can read, ascending."""
    return sorted(_LayerNames.find_all(_ModelFiles(Path(model_dir))))


# --- quantising and dequantising a checkpoint --------------------------------------------------


def quantise_experts(checkpoint: CheckpointExperts, recipe: str) -> CheckpointExperts:
    """A bf16 checkpoint in the number format of a recipe; each expert is quantised when asked for.

    "fp8": power-of-two scales per 128 x 128; "fp8_block": fp32 scales amax / 448 per 128 x 128;
    "mxfp4": e2m1 with a UE8M0 scale per (row, 32); "bf16": unchanged.
    """
    if recipe not in KIND_OF_RECIPE:
        raise WeightsError(f"recipe must be one of {', '.join(KIND_OF_RECIPE)}, got {recipe!r}")
    if checkpoint.kind != "bf16":
        raise WeightsError(f"only bf16 experts are quantised; these are {checkpoint.kind}")
    if recipe == "bf16":
        return checkpoint

    def quantise(weight: torch.Tensor) -> formats.Quantised:
        if recipe == "mxfp4":
            return formats.quantise_e2m1(weight)
        return quantise_e4m3_128x128(weight, power_of_two_scales=recipe == "fp8")

    def load(index: int) -> ExpertWeights:
        source = checkpoint.expert(index)
        values, scales = zip(*map(quantise, (source.gate, source.up, source.down)), strict=True)
        return ExpertWeights(KIND_OF_RECIPE[recipe], *values, *scales)

    return CheckpointExperts(
        kind=KIND_OF_RECIPE[recipe],
        experts=checkpoint.experts,
        hidden=checkpoint.hidden,
        intermediate=checkpoint.intermediate,
        load=load,
    )


def quantise_e4m3_128x128(weight: torch.Tensor, *, power_of_two_scales: bool) -> formats.Quantised:
    """weight [N, K] (fp32, bf16 or fp16) -> e4m3 [N, K], fp32 scales [ceil(N/128), ceil(K/128)]."""
    rows, columns = weight.shape
    values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=weight.device)
    scales = []
    for start in range(0, rows, BLOCK):
        chunk = weight[start : start + BLOCK]
        # Each 128 x 128 block becomes one long row, which gets one scale.
        padded = torch.nn.functional.pad(chunk, (0, -columns % BLOCK))
        blocks = padded.unflatten(1, (-1, BLOCK)).transpose(0, 1)
        quantised, scale = formats.quantise_e4m3_blocks(
            blocks.flatten(1), block=None, power_of_two_scales=power_of_two_scales
        )
        quantised = quantised.view(torch.uint8).view(blocks.shape).transpose(0, 1).flatten(1)
        values.view(torch.uint8)[start : start + BLOCK] = quantised[:, :columns]
        scales.append(scale)
    return formats.Quantised(values, torch.stack(scales))


def dequantise(expert: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(gate [I, H], up [I, H], down [H, I]) of one expert in checkpoint form, fp32."""
    return tuple(_dequantise(expert.kind, *pair) for pair in expert.projections().values())


def _dequantise(kind: str, weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if kind == "bf16":
        return weight.to(torch.float32)
    if kind == "mxfp4":
        return formats.dequantise_e2m1(weight, scale)
    rows, columns = weight.shape
    by_row = scale.repeat_interleave(BLOCK, dim=0)[:rows]
    return formats.decode_e4m3(weight) * by_row.repeat_interleave(BLOCK, dim=1)[:, :columns]


# --- kernel form -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class KernelWeights:
    """One rank's experts as the kernel reads them; Er experts, H and I padded to Hp and Ip.

    w1 [Er * 2Ip, Hp], w2 [Er * Hp, Ip]: bfloat16, float8_e4m3fn, or for mxfp4 uint8 with half the
    columns (see pack_kernel_mxfp4). w1 interleaves gate and up by 8: row 16j + i is gate row
    8j + i, row 16j + 8 + i is up row 8j + i (0 <= i < 8). Padding is zero, its scales are 1.

    w1_scale, w2_scale, fp32. fp8, mxfp4: one power of two per row, [Er, 2Ip] and [Er, Hp].
    fp8_block: [Er, Hp/128, 2Ip] and [Er, Ip/128, Hp], (128 of K, row). bf16: None.

    w1_offset, w2_offset, mxfp4 only: int32 [Er, Hp/128, 2Ip] and [Er, Ip/128, Hp]. Byte j (little
    endian) of word 2b + h of a row is the exponent offset d of k = 256b + 64j + 32h .. + 31; a code
    of value v stands for v * 2^(d - 4) times the row's scale, 0 <= d <= 10.

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
        offsets = unpack_offsets(getattr(self, name + "_offset")[expert].T)
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
    offset = pack_offsets(wanted.clamp_min(0).to(torch.uint8))
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


def pack_offsets(offsets: torch.Tensor) -> torch.Tensor:
    """uint8 [.., K/32] -> int32 [.., K/128] (K a multiple of 256), see KernelWeights."""
    by_half = offsets.unflatten(-1, (-1, 4, 2)).transpose(-1, -2)
    return formats.pack_ue8m0_int32(by_half).flatten(-3)


def unpack_offsets(packed: torch.Tensor) -> torch.Tensor:
    """int32 [.., K/128] -> uint8 [.., K/32]; undoes pack_offsets."""
    by_half = formats.unpack_ue8m0_int32(packed).unflatten(-1, (-1, 2, 4))
    return by_half.transpose(-1, -2).flatten(-3)


# --- a check of gate/up layouts ----------------------------------------------------------------


def diagnose_gate_up(
    checkpoint: CheckpointExperts,
    *,
    expert: int,
    x: torch.Tensor,
    y: torch.Tensor,
    clamp: float | None = None,
) -> dict[str, float]:
    """Relative L2 error of one expert's output under every reading of its gate and up rows.

    x [n, H]: inputs of the expert, y [n, H]: its known outputs (without router weight). Returns
    {"as loaded": .., ..}, smallest error first. When "as loaded" is not first, the layout was named
    wrongly, or gate and up are swapped; the first key says which.
    """
    gate, up, down = checkpoint.dequantise(expert)
    halves = torch.cat((gate, up))
    interleaved = torch.stack((gate, up), dim=1).flatten(0, 1)
    readings = {
        "as loaded": (gate, up),
        "gate and up swapped": (up, gate),
        "loaded as halves, is interleaved": _split_rows(halves, "interleaved"),
        "loaded as interleaved, is halves": _split_rows(interleaved, "halves"),
    }
    x, y = x.to(torch.float32), y.to(torch.float32)
    errors = {}
    for name, (gate_rows, up_rows) in readings.items():
        g, u = x @ gate_rows.T, x @ up_rows.T
        if clamp is not None:
            g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
        out = (torch.nn.functional.silu(g) * u) @ down.T
        errors[name] = float((out - y).norm() / y.norm())
    return dict(sorted(errors.items(), key=lambda item: item[1]))
