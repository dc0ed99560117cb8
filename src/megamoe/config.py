"""The configuration of one MoE layer, the checks of its inputs, and the shapes of known models."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import NamedTuple

import torch

RECIPES = ("bf16", "fp8", "fp8_block", "mxfp4")
ACTIVATIONS = ("swiglu",)
BLOCK_M_CHOICES = (16, 32, 64, 128)
X_SCALES = {
    # recipe -> allowed scale formats of x, the first one is the default
    "bf16": ("none",),
    "fp8": ("ue8m0_32", "token"),
    "fp8_block": ("block128",),
    "mxfp4": ("ue8m0_32", "token"),
}
MAX_RANKS = 72
MAX_TOPK = 32
MAX_HIDDEN = 16384
MAX_CAPACITY = 1 << 20
PAD = 256
SCALE_BLOCK = 128
H_GROUP = 128


class MegaMoEConfigError(ValueError):
    """A configuration that cannot work; the message names the value and what is allowed."""


class MegaMoEInputError(ValueError):
    """Inputs of a call that do not fit the configuration."""


def _require(ok: bool, message: str) -> None:
    if not ok:
        raise MegaMoEConfigError(message)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """One MoE layer under expert parallelism: shapes, number formats, limits.

    hidden, intermediate: sizes of a token and of an expert's inner layer (unpadded).
    experts: all experts of the layer; rank r owns experts [r * E/R, (r + 1) * E/R).
    topk: slots per token. The same expert may occur twice in a token, so topk may exceed experts.
    capacity: the most tokens that one rank may pass in one call.
    recipe: "bf16", "fp8", "fp8_block" or "mxfp4".
    x_scales: format of the scales of x on the wire; None takes the recipe's default.
    clamp: limit c of the activation (gate <= c, -c <= up <= c), None for no limit.
    block_m: fixes the rows of a pool block; None leaves it to the tile policy.
    reserve_sms: SMs that the kernel leaves to other work.
    timeout_s: how long a wait inside the kernel may last before it reports which rank is missing.

    Raises MegaMoEConfigError, whose message names the value and what is allowed.
    """

    hidden: int
    intermediate: int
    experts: int
    topk: int
    capacity: int
    recipe: str
    ranks: int = 1
    x_scales: str | None = None
    clamp: float | None = None
    block_m: int | None = None
    reserve_sms: int = 0
    timeout_s: float = 60.0
    activation: str = "swiglu"

    def __post_init__(self) -> None:
        for name in ("hidden", "intermediate", "experts", "topk", "capacity", "ranks"):
            self._set_integer(name, at_least=1)
        self._set_integer("reserve_sms", at_least=0)
        self._check_formats()
        self._check_shapes()
        self._check_options()

    def _set_integer(self, name: str, *, at_least: int) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Integral):
            raise MegaMoEConfigError(
                f"{name} must be an integer, got {value!r} of type {type(value).__name__}"
            )
        _require(value >= at_least, f"{name} must be at least {at_least}, got {value}")
        object.__setattr__(self, name, int(value))

    def _set_positive_float(self, name: str) -> None:
        value = getattr(self, name)
        if isinstance(value, bool) or not isinstance(value, numbers.Real):
            raise MegaMoEConfigError(
                f"{name} must be a number, got {value!r} of type {type(value).__name__}"
            )
        _require(
            math.isfinite(value) and value > 0,
            f"{name} must be finite and greater than 0, got {value}",
        )
        object.__setattr__(self, name, float(value))

    def _check_formats(self) -> None:
        _require(
            self.recipe in RECIPES,
            f"recipe must be one of {', '.join(RECIPES)}, got {self.recipe!r}",
        )
        _require(
            self.activation in ACTIVATIONS,
            f"activation {self.activation!r} is not supported, only {', '.join(ACTIVATIONS)}",
        )
        allowed = X_SCALES[self.recipe]
        if self.x_scales is None:
            object.__setattr__(self, "x_scales", allowed[0])
        _require(
            self.x_scales in allowed,
            f"x_scales {self.x_scales!r} does not go with recipe {self.recipe!r}: "
            f"use {' or '.join(allowed)}",
        )

    def _check_shapes(self) -> None:
        _require(self.ranks <= MAX_RANKS, f"ranks must be at most {MAX_RANKS}, got {self.ranks}")
        _require(
            self.experts % self.ranks == 0,
            f"{self.experts} experts cannot be divided evenly over {self.ranks} ranks: "
            "choose a number of ranks that divides the number of experts",
        )
        _require(self.topk <= MAX_TOPK, f"topk must be at most {MAX_TOPK}, got {self.topk}")
        _require(
            self.capacity <= MAX_CAPACITY,
            f"capacity must be at most {MAX_CAPACITY} tokens per rank, got {self.capacity}",
        )
        _require(
            self.hidden <= MAX_HIDDEN, f"hidden must be at most {MAX_HIDDEN}, got {self.hidden}"
        )
        in_blocks = self.x_scales == "ue8m0_32" or self.recipe == "mxfp4"
        multiple = 32 if in_blocks else 8
        why = f" (recipe {self.recipe} has scale blocks of 32)" if in_blocks else ""
        _require(
            self.hidden % multiple == 0,
            f"hidden must be a multiple of {multiple}{why}, got {self.hidden}",
        )
        _require(
            self.intermediate % 8 == 0,
            f"intermediate must be a multiple of 8, got {self.intermediate}",
        )

    def _check_options(self) -> None:
        if self.clamp is not None:
            self._set_positive_float("clamp")
        self._set_positive_float("timeout_s")
        if self.block_m is not None:
            self._set_integer("block_m", at_least=1)
            _require(
                self.block_m in BLOCK_M_CHOICES,
                f"block_m must be one of {', '.join(map(str, BLOCK_M_CHOICES))} or None "
                f"(left to the tile policy), got {self.block_m}",
            )

    @property
    def experts_per_rank(self) -> int:
        return self.experts // self.ranks

    @property
    def padded_hidden(self) -> int:
        """Hidden size inside the kernel, a multiple of 256; the padding is zero."""
        return _round_up(self.hidden, PAD)

    @property
    def padded_intermediate(self) -> int:
        """Intermediate size inside the kernel, a multiple of 256; the padding is zero."""
        return _round_up(self.intermediate, PAD)

    @property
    def h_group(self) -> int:
        """Columns of L1's output that share one scale (all recipes but bf16)."""
        return H_GROUP

    @property
    def x_dtype(self) -> torch.dtype:
        """dtype of x on the wire."""
        return torch.bfloat16 if self.recipe == "bf16" else torch.float8_e4m3fn

    @property
    def h_dtype(self) -> torch.dtype:
        """dtype of L1's output."""
        return torch.bfloat16 if self.recipe == "bf16" else torch.float8_e4m3fn

    @property
    def weight_bits(self) -> int:
        """Bits of one weight in memory, scales not counted."""
        return {"bf16": 16, "fp8": 8, "fp8_block": 8, "mxfp4": 4}[self.recipe]

    @property
    def x_row_bytes(self) -> int:
        """Bytes of one (padded) token row of x on the wire, scales not counted."""
        return self.padded_hidden * self.x_dtype.itemsize

    @property
    def h_row_bytes(self) -> int:
        """Bytes of one (padded) row of L1's output, scales not counted."""
        return self.padded_intermediate * self.h_dtype.itemsize

    @property
    def x_scale_dtype(self) -> torch.dtype | None:
        """dtype of the scales of x: int32 holds four UE8M0 codes, the first in the low byte."""
        by_format = {"none": None, "ue8m0_32": torch.int32}
        return by_format.get(self.x_scales, torch.float32)

    @property
    def x_scale_columns(self) -> int:
        """Columns of the x_scale that a caller passes: [t, columns]; 0 where there is none.

        ue8m0_32 and block128: ceil(hidden / 128); token: 1.
        """
        by_format = {"none": 0, "token": 1}
        return by_format.get(self.x_scales, -(-self.hidden // SCALE_BLOCK))

    @property
    def x_scale_wire_columns(self) -> int:
        """Columns of the scales of x in the symmetric buffer (the padded x_scale_columns)."""
        by_format = {"none": 0, "token": 1}
        return by_format.get(self.x_scales, self.padded_hidden // SCALE_BLOCK)


class RankInputs(NamedTuple):
    """One rank's checked inputs: topk_weights is float32, the others are as they were given."""

    x: torch.Tensor
    x_scale: torch.Tensor | None
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def validate_inputs(
    config: MoEConfig,
    *,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    x_scale: torch.Tensor | None = None,
    rank: int | None = None,
    check_ids: bool = True,
) -> RankInputs:
    """Check one rank's inputs of a call, before anything is written or launched.

    x [t, hidden]: bfloat16; or float8_e4m3fn together with x_scale (all recipes but bf16).
    x_scale: int32 [t, ceil(hidden/128)] (ue8m0_32), float32 [t, ceil(hidden/128)] (block128),
    float32 [t] or [t, 1] (token). topk_idx [t, topk]: int32 or int64, -1 skips the slot.
    topk_weights [t, topk]: float32, or bfloat16/float16 which are converted. t may be 0.

    rank is only named in messages. check_ids=False leaves out the range check of the ids, which
    makes the host wait for the device.
    Raises MegaMoEInputError.
    """
    check = _InputCheck(config, "" if rank is None else f"rank {rank}: ")
    check.tensors(x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    tokens = check.shapes(x, topk_idx, topk_weights)
    check.dtypes(x, topk_idx, topk_weights)
    check.scale(x, x_scale, tokens)
    given = {"x": x, "x_scale": x_scale, "topk_idx": topk_idx, "topk_weights": topk_weights}
    check.memory({name: tensor for name, tensor in given.items() if tensor is not None})
    if check_ids:
        check.ids(topk_idx)
    return RankInputs(x, x_scale, topk_idx, topk_weights.to(torch.float32))


class _InputCheck:
    def __init__(self, config: MoEConfig, prefix: str) -> None:
        self.config = config
        self.prefix = prefix

    def require(self, ok: bool, message: str) -> None:
        if not ok:
            raise MegaMoEInputError(self.prefix + message)

    def tensors(self, **given: object) -> None:
        for name, value in given.items():
            self.require(
                isinstance(value, torch.Tensor),
                f"{name} must be a torch.Tensor, got {type(value).__name__}",
            )

    def shapes(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> int:
        config = self.config
        self.require(
            x.dim() == 2 and x.shape[1] == config.hidden,
            f"x must have shape [tokens, {config.hidden}], got {list(x.shape)}",
        )
        tokens = x.shape[0]
        self.require(
            tokens <= config.capacity,
            f"{tokens} tokens > capacity {config.capacity}: pass at most {config.capacity} "
            "tokens per rank, or configure a larger capacity",
        )
        for name, tensor in (("topk_idx", idx), ("topk_weights", weights)):
            self.require(
                tuple(tensor.shape) == (tokens, config.topk),
                f"{name} must have shape [{tokens}, {config.topk}] (tokens of x, topk), "
                f"got {list(tensor.shape)}",
            )
        return tokens

    def dtypes(self, x: torch.Tensor, idx: torch.Tensor, weights: torch.Tensor) -> None:
        allowed = [torch.bfloat16]
        if self.config.recipe != "bf16":
            allowed.append(torch.float8_e4m3fn)
        self.dtype(f"x (recipe {self.config.recipe})", x, allowed)
        self.dtype("topk_idx", idx, [torch.int32, torch.int64])
        self.dtype("topk_weights", weights, [torch.float32, torch.bfloat16, torch.float16])

    def dtype(self, name: str, tensor: torch.Tensor, allowed: list[torch.dtype]) -> None:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        self.require(
            tensor.dtype in allowed,
            f"{name} must be {names}, got {str(tensor.dtype).removeprefix('torch.')}",
        )

    def scale(self, x: torch.Tensor, x_scale: torch.Tensor | None, tokens: int) -> None:
        config = self.config
        if x.dtype == torch.bfloat16:
            self.require(
                x_scale is None,
                "x_scale is only allowed with a float8_e4m3fn x; "
                "a bfloat16 x is quantised with scales of its own",
            )
            return
        self.require(
            isinstance(x_scale, torch.Tensor),
            f"a float8_e4m3fn x needs x_scale ({config.x_scales}), got {type(x_scale).__name__}",
        )
        self.dtype(f"x_scale ({config.x_scales})", x_scale, [config.x_scale_dtype])
        shapes = [(tokens, config.x_scale_columns)]
        if config.x_scales == "token":
            shapes.append((tokens,))
        self.require(
            tuple(x_scale.shape) in shapes,
            f"x_scale ({config.x_scales}) must have shape "
            f"{' or '.join(str(list(shape)) for shape in shapes)}, got {list(x_scale.shape)}",
        )

    def memory(self, given: dict[str, torch.Tensor]) -> None:
        device = given["x"].device
        for name, tensor in given.items():
            self.require(
                tensor.device == device, f"{name} is on {tensor.device}, but x is on {device}"
            )
            self.require(
                tensor.is_contiguous(),
                f"{name} must be contiguous, got shape {list(tensor.shape)} with strides "
                f"{list(tensor.stride())}: call .contiguous()",
            )

    def ids(self, idx: torch.Tensor) -> None:
        experts = self.config.experts
        bad = (idx < -1) | (idx >= experts)
        if not bool(bad.any()):
            return
        row, slot = bad.nonzero()[0].tolist()
        self.require(
            False,
            f"topk_idx[{row}, {slot}] is {int(idx[row, slot])}: an expert id must be between 0 "
            f"and {experts - 1}, or -1 to skip the slot",
        )


@dataclass(frozen=True)
class ModelShape:
    """The routed experts of one layer of a public model."""

    hidden: int
    intermediate: int
    experts: int
    topk: int
    clamp: float | None = None
    note: str = ""

    def config(self, **options: object) -> MoEConfig:
        """A MoEConfig of this shape; options are the other fields (capacity, recipe, ranks, ...).

        Raises MegaMoEConfigError.
        """
        fields = {
            "hidden": self.hidden,
            "intermediate": self.intermediate,
            "experts": self.experts,
            "topk": self.topk,
            "clamp": self.clamp,
        }
        return MoEConfig(**(fields | options))


# Sources: the public config.json or transformers configuration class of each model, except
# DeepSeek-V4 (the shapes of the public DeepGEMM benchmarks) and Kimi-K2 (public kernel reports).
MODELS: dict[str, ModelShape] = {
    "DeepSeek-V3": ModelShape(7168, 2048, 256, 8),
    "DeepSeek-V4-Flash": ModelShape(4096, 2048, 256, 6, clamp=10.0),
    "DeepSeek-V4-Pro": ModelShape(7168, 3072, 384, 6, clamp=10.0),
    "GLM-4.5-Air": ModelShape(4096, 1408, 128, 8),
    "Kimi-K2": ModelShape(7168, 2048, 384, 8),
    "Mixtral-8x7B": ModelShape(4096, 14336, 8, 2),
    "Qwen3-30B-A3B": ModelShape(2048, 768, 128, 8),
    "Qwen3-235B-A22B": ModelShape(4096, 1536, 128, 8),
    "gpt-oss-120b": ModelShape(
        2880, 2880, 128, 4, note="shape only: its biases and its SwiGLU variant are not supported"
    ),
}


def model_shape(name: str) -> ModelShape:
    """The shape of a known model by name, upper and lower case alike.

    Raises MegaMoEConfigError that lists the known names.
    """
    by_lower = {known.lower(): shape for known, shape in MODELS.items()}
    shape = by_lower.get(name.lower())
    if shape is None:
        raise MegaMoEConfigError(f"unknown model {name!r}: known are {', '.join(MODELS)}")
    return shape
