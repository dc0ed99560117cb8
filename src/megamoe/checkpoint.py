"""Expert weights in the layouts of checkpoints: reading, quantising and dequantising them.

A checkpoint's experts are one of three kinds, each with matrices gate [I, H], up [I, H] and
down [H, I] (y = down @ (silu(gate x) * up x)):

  bf16    bfloat16
  fp8     float8_e4m3fn, with one fp32 scale per 128 x 128 block: [ceil(N/128), ceil(K/128)]
  mxfp4   e2m1 codes, two a byte, low nibble first: uint8 [N, K/2], with one UE8M0 code per
          (row, 32 of K): uint8 [N, ceil(K/32)]

Experts are loaded, converted and checked one at a time.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch

from megamoe import formats

KINDS = ("bf16", "fp8", "mxfp4")
LAYOUTS = ("halves", "interleaved")
KIND_OF_RECIPE = {"bf16": "bf16", "fp8": "fp8", "fp8_block": "fp8", "mxfp4": "mxfp4"}
BLOCK = 128

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
