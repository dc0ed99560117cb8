"""The symmetric buffer of one rank: one block of memory cut into the plan's regions."""

from __future__ import annotations

from math import prod

import torch

from megamoe import formats
from megamoe.config import RankInputs
from megamoe.plan import CONTROL, Plan, Region

TORCH_DTYPE = {
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float8e4nv": torch.float8_e4m3fn,
}
# written by the kernel before anybody reads them: filled with NaN before a launch when asked
SCRATCH = (
    "pool_x",
    "pool_x_scale",
    "pool_weight",
    "pool_origin",
    "pool_h",
    "pool_h_scale",
    "partials",
    "l1_acc",
)
NAN_BYTE = 0xFF  # NaN in e4m3, bf16 and fp32, -1 as an integer


class MegaMoEError(RuntimeError):
    """The kernel gave up: a rank did not arrive, or its input could not be used."""


def allocate_unpacked(plan: Plan, device: torch.device | str) -> torch.Tensor:
    """Memory for the weights that dispatch unpacks, written before it is read: uint8."""
    return torch.empty(plan.unpacked_bytes, dtype=torch.uint8, device=device)


class SymmetricBuffer:
    """Views of one rank's buffer by region name, and the few things the host does with it.

    memory: uint8 [plan.nbytes], zeroed, on the CPU or a GPU.
    unpacked: uint8 [plan.unpacked_bytes], on the same device; this rank's own.
    """

    def __init__(self, *, plan: Plan, memory: torch.Tensor, unpacked: torch.Tensor) -> None:
        if memory.dtype != torch.uint8 or memory.numel() != plan.nbytes:
            raise ValueError(
                f"the buffer needs {plan.nbytes} bytes of uint8, "
                f"got {memory.numel()} of {memory.dtype}"
            )
        self.plan = plan
        self.memory = memory
        self.unpacked = unpacked

    @classmethod
    def allocate(cls, *, plan: Plan, device: str = "cpu") -> SymmetricBuffer:
        memory = torch.zeros(plan.nbytes, dtype=torch.uint8, device=device)
        return cls(plan=plan, memory=memory, unpacked=allocate_unpacked(plan, device))

    def view(self, name: str) -> torch.Tensor:
        """The region as a tensor of its shape and dtype, sharing memory."""
        region = self.plan.region[name]
        flat = self.memory[region.offset : region.offset + region.nbytes]
        return flat.view(TORCH_DTYPE[region.dtype]).reshape(region.shape)

    def write_inputs(self, inputs: RankInputs) -> None:
        """Copy one rank's checked and quantised inputs; columns past `hidden` stay zero."""
        config, tokens = self.plan.config, inputs.x.shape[0]
        self.view("x")[:tokens, : config.hidden] = inputs.x
        # ids out of range stay out of range as int32
        self.view("topk_idx")[:tokens] = inputs.topk_idx.clamp(-2, config.experts)
        self.view("topk_weights")[:tokens] = inputs.topk_weights
        if config.x_scales == "ue8m0_32":
            codes = formats.unpack_ue8m0_int32(inputs.x_scale)[:, : config.hidden // 32]
            # the scale of a block of zeros says nothing, and must not set the scale of its token
            values = inputs.x.view(torch.uint8).reshape(tokens, config.hidden // 32, 32)
            empty = ((values & 0x7F) == 0).all(dim=2)
            self.view("x_scale")[:tokens, : config.hidden // 32] = codes.masked_fill(empty, 0)
        elif config.x_scales == "block128":
            self.view("x_scale")[:tokens, : inputs.x_scale.shape[1]] = inputs.x_scale
        elif config.x_scales == "token":
            self.view("x_scale")[:tokens] = inputs.x_scale.reshape(tokens)

    def poison(self) -> list[Region]:
        """Fill everything the kernel must write before reading with NaN; returns those regions."""
        regions = [self.plan.region[name] for name in SCRATCH if prod(self.plan.region[name].shape)]
        for region in regions:
            self.memory[region.offset : region.offset + region.nbytes] = NAN_BYTE
        self.unpacked.fill_(NAN_BYTE)
        return regions

    def epoch(self) -> int:
        """Number of calls that have begun on this buffer."""
        return int(self.view("control")[CONTROL["epoch"]])

    def received(self) -> torch.Tensor:
        """Rows that each local expert received from each rank in the last call: int32 [ranks,
        experts_per_rank].
        """
        return self.view("recv_counts")[self.epoch() & 1].clone()

    def inexact(self) -> int:
        """Values of x that lost bits when rebased to one scale a token, over all calls (wraps at
        2^32).
        """
        return int(self.view("control")[CONTROL["inexact"]]) & 0xFFFFFFFF
