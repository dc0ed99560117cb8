"""Writing a call's inputs into the symmetric buffer with one launch: the host side of
:mod:`megamoe.kernel.stage`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from megamoe.config import RankInputs
from megamoe.kernel.stage import stage_kernel
from megamoe.plan import Plan
from megamoe.symmetric import SymmetricBuffer

if TYPE_CHECKING:
    from megamoe.interpreter import Machine

WARPS = 4
PROGRAMS_PER_SM = 8
# fusing a multiplication into an addition would change the quantised bits
OPTIONS = {"num_warps": WARPS, "enable_fp_fusion": False}


@dataclass(frozen=True)
class StageSpec:
    """What the staging kernel is specialised on.

    quantised: x comes in the format of the wire. wide_ids: topk_idx is int64. topk_idx ..
    x_scale: byte offsets in the buffer. scale_columns: of the caller's x_scale, 0 without one.
    """

    x_scales: str
    hidden: int
    padded_hidden: int
    topk: int
    quantised: bool
    wide_ids: bool
    x_bytes: int
    scale_columns: int
    wire_scale_columns: int
    topk_idx: int
    topk_weights: int
    x: int
    x_scale: int

    @property
    def block(self) -> int:
        return 32 if self.x_scales == "ue8m0_32" else 128

    @property
    def blocks_in_pass(self) -> bool:
        """Whether the scales of blocks must be seen together with their values."""
        return self.x_scales == "ue8m0_32" or (self.x_scales == "block128" and not self.quantised)

    @property
    def vector(self) -> int:
        """Bytes that the beginning of every row of the caller's x is a multiple of."""
        row = self.hidden * (self.x_bytes if self.quantised else 2)
        return 16 if row % 16 == 0 else 8


def stage_spec(plan: Plan, *, quantised: bool, wide_ids: bool) -> StageSpec:
    """quantised: as in :class:`StageSpec`; the recipe bf16 has no other x than bf16."""
    config = plan.config
    return StageSpec(
        x_scales=config.x_scales,
        hidden=config.hidden,
        padded_hidden=config.padded_hidden,
        topk=config.topk,
        quantised=quantised or config.recipe == "bf16",
        wide_ids=wide_ids,
        x_bytes=config.x_dtype.itemsize,
        scale_columns=config.x_scale_columns,
        wire_scale_columns=config.x_scale_wire_columns,
        **{name: plan.region[name].offset for name in ("topk_idx", "topk_weights", "x", "x_scale")},
    )


def stage_specs(plan: Plan) -> list[StageSpec]:
    """Every staging kernel that a configuration can need."""
    forms = (True,) if plan.config.recipe == "bf16" else (False, True)
    return [
        stage_spec(plan, quantised=quantised, wide_ids=wide)
        for quantised in forms
        for wide in (False, True)
    ]


def spec_of(plan: Plan, inputs: RankInputs) -> StageSpec:
    return stage_spec(
        plan,
        quantised=inputs.x.dtype == torch.float8_e4m3fn,
        wide_ids=inputs.topk_idx.dtype == torch.int64,
    )


def compile_stage(buffer: SymmetricBuffer, spec: StageSpec) -> None:
    """Compile one staging kernel and launch it on the device of the buffer, over no tokens: a first
    launch takes about half a millisecond longer than the next ones.
    """
    device = buffer.memory.device
    ids = torch.zeros(1, dtype=torch.int64 if spec.wide_ids else torch.int32, device=device)
    weights = torch.zeros(1, device=device)
    bf16 = not spec.quantised or spec.x_bytes == 2
    x = torch.zeros(16, dtype=torch.bfloat16 if bf16 else torch.uint8, device=device)
    scales = weights.view(torch.int32) if spec.x_scales == "ue8m0_32" else weights
    stage_kernel[(1,)](buffer.memory.view(torch.int8), x, scales, ids, weights, 0, spec, **OPTIONS)


def stage(buffer: SymmetricBuffer, inputs: RankInputs, *, sms: int) -> None:
    """Write one rank's checked inputs into its buffer, on the current stream: one launch."""
    tokens = inputs.x.shape[0]
    if tokens == 0:
        return
    spec = spec_of(buffer.plan, inputs)
    x = inputs.x
    if x.data_ptr() % 16:
        x = x.clone()  # rows are read in vectors
    x = x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
    scale = inputs.x_scale
    if scale is None:
        scale = buffer.memory.view(
            torch.int32 if spec.x_scales == "ue8m0_32" else torch.float32
        )  # not read
    stage_kernel[(programs(spec, tokens, PROGRAMS_PER_SM * sms),)](
        buffer.memory.view(torch.int8),
        x,
        scale,
        inputs.topk_idx,
        inputs.topk_weights,
        tokens,
        spec,
        **OPTIONS,
    )


def programs(spec: StageSpec, tokens: int, most: int) -> int:
    """Enough for every 4 rows by 512 columns to have a program, but at most `most`."""
    columns = 1 if spec.x_scales == "token" and not spec.quantised else -(-spec.hidden // 512)
    return max(1, min(most, -(-tokens // 4) * columns))


def stage_on_interpreter(
    machine: Machine, buffer: SymmetricBuffer, inputs: RankInputs, *, grid: int = 2
) -> None:
    """Run the staging kernel on simulated rank 0; `buffer` is in CPU memory."""
    spec = spec_of(buffer.plan, inputs)
    scale = torch.zeros(1) if inputs.x_scale is None else inputs.x_scale
    bf16 = inputs.x.dtype == torch.bfloat16
    x = inputs.x.view(torch.int16 if bf16 else torch.uint8)

    def pointer(tensor: torch.Tensor, dtype: str, name: str) -> object:
        return machine.pointer(machine.register(0, tensor, name=name), dtype=dtype)

    machine.enqueue(
        0,
        stage_kernel,
        grid=grid,
        args=[
            pointer(buffer.memory, "int8", "buffer"),
            pointer(x, "bfloat16" if bf16 else "uint8", "x"),
            pointer(scale, str(scale.dtype).removeprefix("torch."), "x_scale"),
            pointer(inputs.topk_idx, "int64" if spec.wide_ids else "int32", "topk_idx"),
            pointer(inputs.topk_weights, "float32", "topk_weights"),
            inputs.x.shape[0],
        ],
        kwargs={"spec": spec},
        num_warps=WARPS,
    )
    machine.run()
