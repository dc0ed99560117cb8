"""Small random experts and configurations, for the tests of checkpoints and of kernel weights."""

from types import SimpleNamespace

import torch

from megamoe.checkpoint import CheckpointExperts
from megamoe.config import MoEConfig

SEED = 99


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(SEED)


def random_experts(hidden: int, intermediate: int, experts: int = 4) -> SimpleNamespace:
    g = generator()
    shape = {"gate": (intermediate, hidden), "up": (intermediate, hidden)}
    shape["down"] = (hidden, intermediate)
    return SimpleNamespace(
        **{n: torch.randn(experts, *s, generator=g).to(torch.bfloat16) for n, s in shape.items()}
    )


def checkpoint(hidden: int, intermediate: int, experts: int = 4) -> CheckpointExperts:
    w = random_experts(hidden, intermediate, experts)
    return CheckpointExperts.from_per_expert(gate_proj=w.gate, up_proj=w.up, down_proj=w.down)


def config_for(source: CheckpointExperts, recipe: str, ranks: int = 1) -> MoEConfig:
    return MoEConfig(
        hidden=source.hidden,
        intermediate=source.intermediate,
        experts=source.experts,
        topk=2,
        capacity=8,
        recipe=recipe,
        ranks=ranks,
    )


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


def fused(w: SimpleNamespace, layout: str) -> torch.Tensor:
    """gate and up of all experts in one tensor [E, 2I, H]."""
    if layout == "halves":
        return torch.cat((w.gate, w.up), dim=1)
    return torch.stack((w.gate, w.up), dim=2).flatten(1, 2)
