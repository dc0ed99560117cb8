"""What the benchmark runs: shapes, routings, weights made on the device, and the work in a call.

Nothing here touches a GPU unless it is given one as `device`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megamoe.config import MODELS, MoEConfig, RankInputs
from megamoe.formats import quantise_x
from megamoe.weights import MXFP4_OFFSET_BIAS, KernelWeights

ROUTINGS = ("balanced", "uniform", "zipf", "one-hot")
# hidden, intermediate, experts per rank, top-k
PRESETS = {"flash": (4096, 2048, 32, 6), "pro": (7168, 3072, 48, 6)}
CHUNK_ROWS = 1 << 14


class BenchError(ValueError):
    """A benchmark that cannot be run or compared as asked."""


def shape_fields(name: str, *, ranks: int) -> dict[str, object]:
    """hidden, intermediate, experts, topk and clamp of a preset or a known model.

    name: "flash" or "pro", of which every rank has its experts; a name in config.MODELS, whose
    experts are divided over the ranks; or "H,I,EXPERTS_PER_RANK,TOPK".  Raises BenchError.
    """
    if ranks < 1:
        raise BenchError(f"ranks must be at least 1, got {ranks}")
    known = {model.lower(): model for model in MODELS}
    if name.lower() in PRESETS:
        hidden, intermediate, experts, topk = PRESETS[name.lower()]
    elif name.lower() in known:
        shape = MODELS[known[name.lower()]]
        return {
            "hidden": shape.hidden,
            "intermediate": shape.intermediate,
            "experts": shape.experts,
            "topk": shape.topk,
            "clamp": shape.clamp,
        }
    else:
        try:
            hidden, intermediate, experts, topk = (int(part) for part in name.split(","))
        except ValueError:
            raise BenchError(
                f"unknown shape {name!r}: give {', '.join(PRESETS)}, a model "
                f"({', '.join(MODELS)}), or hidden,intermediate,experts-per-rank,topk"
            ) from None
    return {
        "hidden": hidden,
        "intermediate": intermediate,
        "experts": experts * ranks,
        "topk": topk,
        "clamp": None,
    }


# --- routing ---------------------------------------------------------------------------------


def choose_experts(config: MoEConfig, *, tokens: int, routing: str, seed: int) -> torch.Tensor:
    """The experts of `tokens` tokens on every rank: int32 [ranks, tokens, topk].

    balanced: experts, ranks and the tokens' own ranks all get the same number of slots, or one
    more; the experts of a token differ while there are enough of them.
    uniform: each token draws without repetition, every expert alike; a small call leaves some out.
    zipf: without repetition, expert e in proportion to 1 / (place of e + 1), places at random.
    one-hot: every slot takes the same expert, chosen at random.
    """
    generator = torch.Generator().manual_seed(seed)
    ranks, experts, topk = config.ranks, config.experts, config.topk
    if routing == "balanced":
        return _balanced(config, tokens, generator)
    if routing in ("uniform", "zipf"):
        share = torch.ones(experts)
        if routing == "zipf":
            share = 1.0 / torch.arange(1, experts + 1)
            share = share[torch.randperm(experts, generator=generator)]
        idx = draw_experts(share, rows=ranks * tokens, topk=topk, generator=generator)
        return idx.to(torch.int32).view(ranks, tokens, topk)
    if routing == "one-hot":
        expert = int(torch.randint(experts, (1,), generator=generator))
        return torch.full((ranks, tokens, topk), expert, dtype=torch.int32)
    raise BenchError(f"routing must be one of {', '.join(ROUTINGS)}, got {routing!r}")


def _balanced(config: MoEConfig, tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Slots take the places of one cycle over all experts, whose neighbours lie on different
    ranks; then the tokens, and the slots of each, are shuffled.
    """
    ranks, local, topk = config.ranks, config.experts_per_rank, config.topk
    owner = torch.randperm(ranks, generator=generator)
    within = torch.stack([torch.randperm(local, generator=generator) for _ in range(ranks)])
    # cycle[i]: the (i // ranks)-th expert of rank owner[i % ranks]
    cycle = (owner[None, :] * local + within.T[:, owner]).flatten()
    # one after another over the ranks' tokens, so that what is uneven does not add up
    place = torch.arange(ranks * tokens * topk) % config.experts
    idx = cycle[place].view(ranks * tokens, topk)
    order = torch.rand(idx.shape, generator=generator).argsort(dim=1)
    idx = idx.gather(1, order).view(ranks, tokens, topk)
    return idx[:, torch.randperm(tokens, generator=generator)].to(torch.int32)


def draw_experts(
    share: torch.Tensor, *, rows: int, topk: int, generator: torch.Generator
) -> torch.Tensor:
    """int64 [rows, topk]: experts in proportion to `share` [experts], in a row each at most once
    unless there are fewer than `topk`.
    """
    if rows == 0:
        return torch.zeros(0, topk, dtype=torch.int64)
    repeat = topk > share.numel()
    return torch.multinomial(share.expand(rows, -1), topk, replacement=repeat, generator=generator)


def random_inputs(
    config: MoEConfig, *, idx: torch.Tensor, seed: int, device: torch.device | str
) -> RankInputs:
    """One rank's inputs for the experts `idx` int32 [tokens, topk], quantised as on the wire."""
    generator = torch.Generator(device=device).manual_seed(seed)
    tokens = idx.shape[0]
    x = torch.randn(tokens, config.hidden, generator=generator, device=device).bfloat16()
    weights = torch.rand(tokens, config.topk, generator=generator, device=device) + 0.1
    weights = weights / weights.sum(dim=1, keepdim=True)
    values, scale = quantise_x(x, x_scales=config.x_scales)
    return RankInputs(values, scale, idx.to(device).contiguous(), weights)


# --- weights ---------------------------------------------------------------------------------


def random_weights(
    config: MoEConfig, *, rank: int, seed: int, device: torch.device | str
) -> KernelWeights:
    """One rank's experts, random in the kernel's own layout, made on the device in chunks.

    Every product keeps about the size of its input: the values times their scale have a variance
    near 1 / K.
    """
    generator = torch.Generator(device=device).manual_seed(seed * 1_000_003 + rank)
    experts, hidden, intermediate = (
        config.experts_per_rank,
        config.padded_hidden,
        config.padded_intermediate,
    )
    tensors = {}
    for name, rows, columns in (
        ("w1", 2 * intermediate, hidden),
        ("w2", hidden, intermediate),
    ):
        matrix = _random_matrix(config.recipe, experts * rows, columns, generator, device)
        real = 2 * config.intermediate if name == "w1" else config.hidden
        # rows of the padding: gate and up alternate in eights, so both end together
        matrix.view(torch.uint8).view(experts, rows, -1)[:, real:] = 0
        tensors[name] = matrix
        tensors |= _random_scales(config.recipe, name, experts, rows, columns, generator, device)
    return KernelWeights(config=config, rank=rank, **tensors)


def _random_matrix(
    recipe: str, rows: int, columns: int, generator: torch.Generator, device: torch.device | str
) -> torch.Tensor:
    if recipe == "mxfp4":
        return torch.randint(
            0, 256, (rows, columns // 2), generator=generator, device=device, dtype=torch.uint8
        )
    dtype = torch.bfloat16 if recipe == "bf16" else torch.float8_e4m3fn
    size = columns**-0.5 if recipe == "bf16" else 16.0
    out = torch.empty(rows, columns, dtype=dtype, device=device)
    for start in range(0, rows, CHUNK_ROWS):
        part = out[start : start + CHUNK_ROWS]
        values = torch.randn(part.shape, generator=generator, device=device) * size
        part.copy_(values.clamp(-448, 448).to(dtype))
    return out


def _random_scales(
    recipe: str,
    name: str,
    experts: int,
    rows: int,
    columns: int,
    generator: torch.Generator,
    device: torch.device | str,
) -> dict[str, torch.Tensor]:
    if recipe == "bf16":
        return {}
    if recipe == "fp8_block":
        # one scale a block of 128 x 128, repeated for each of its rows
        shape = (experts, columns // 128, rows // 128)
        scale = torch.rand(shape, generator=generator, device=device) + 0.5
        scale = (scale * columns**-0.5 / 16).repeat_interleave(128, dim=2)
        return {name + "_scale": scale.contiguous()}
    # the root mean square of random e2m1 codes is near 3, of the e4m3 values 16
    exponent = -round(torch.log2(torch.tensor(columns**0.5)).item())
    exponent -= 2 if recipe == "mxfp4" else 4
    jitter = torch.randint(-1, 2, (experts, rows), generator=generator, device=device)
    scales = {name + "_scale": torch.exp2((exponent + jitter).float())}
    if recipe == "mxfp4":
        low, high = MXFP4_OFFSET_BIAS - 1, MXFP4_OFFSET_BIAS + 1
        offset = torch.randint(
            low, high + 1, (experts, columns // 128, rows, 4),
            generator=generator, device=device, dtype=torch.uint8,
        )  # fmt: skip
        scales[name + "_offset"] = offset.view(torch.int32).squeeze(-1)
    return scales


# --- the work in a call, and its floor -----------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What this machine reached in the same run: read rate of the GPU's memory, rate into one GPU
    from its peers while all copy (0 with one GPU), both GB/s, and cuBLAS TFLOPS.
    """

    memory_gbs: float
    link_gbs: float
    fp8_tflops: float
    bf16_tflops: float

    def matrix_tflops(self, recipe: str) -> float:
        """mxfp4 weights are multiplied as e4m3 on Hopper."""
        return self.bf16_tflops if recipe == "bf16" else self.fp8_tflops


@dataclass(frozen=True, kw_only=True)
class Work:
    """What one call must do; of the rank that has most of each, but for `flops`.

    flops: 6 * hidden * intermediate * active slots, mean over the ranks.
    busiest_flops: the same of the rank with most rows.
    memory_bytes: weights and scales of experts that got a row, x read once, y written once.
    link_bytes: what arrives over NVLink as the kernel sends it: an x row a remote slot, and a bf16
    partial a remote slot.
    least_link_bytes: what no schedule could avoid: an x row and a summed bf16 row for each pair of
    a token and a remote rank that computes for it.
    """

    flops: float
    busiest_flops: float
    memory_bytes: float
    link_bytes: float
    least_link_bytes: float

    def floor_us(self, limits: Limits, *, recipe: str) -> dict[str, float]:
        """Microseconds of each limit alone; the floor of a call is the largest."""
        link = self.least_link_bytes / limits.link_gbs / 1e3 if self.least_link_bytes else 0.0
        return {
            "memory": self.memory_bytes / limits.memory_gbs / 1e3,
            "matrix": self.busiest_flops / limits.matrix_tflops(recipe) / 1e6,
            "link": link,
        }


def work_of(config: MoEConfig, idx: torch.Tensor) -> Work:
    """The work for the routing idx int [ranks, tokens, topk], -1 for a masked slot."""
    ranks, tokens = idx.shape[:2]
    local = config.experts_per_rank
    active = idx >= 0
    owner = torch.where(active, idx // local, -1)
    counts = torch.bincount(idx[active].long(), minlength=config.experts).view(ranks, local)
    per_slot = 6.0 * config.hidden * config.intermediate
    hit = (counts > 0).sum(dim=1)
    x_row = config.hidden * config.x_dtype.itemsize + _scale_bytes(config)
    y_row = 2 * config.hidden
    memory = hit * _expert_bytes(config) + tokens * (x_row + y_row)
    source = torch.arange(ranks)
    remote = torch.zeros(ranks, dtype=torch.int64)  # slots that arrive to be computed here
    away = torch.zeros(ranks, dtype=torch.int64)  # slots of this rank computed elsewhere
    least = torch.zeros(2, ranks, dtype=torch.int64)
    for rank in range(ranks):
        here = owner == rank
        other = source != rank
        remote[rank] = here[other].sum()
        away[rank] = (active[rank] & (owner[rank] != rank)).sum()
        least[0, rank] = here.any(dim=2)[other].sum()
        least[1, rank] = sum(int((owner[rank] == r).any(dim=1).sum()) for r in source[other])
    arriving = remote * x_row + away * y_row
    least_arriving = least[0] * x_row + least[1] * y_row
    return Work(
        flops=per_slot * float(active.sum()) / ranks,
        busiest_flops=per_slot * float(counts.sum(dim=1).max()),
        memory_bytes=float(memory.max()),
        link_bytes=float(arriving.max()),
        least_link_bytes=float(least_arriving.max()),
    )


def _scale_bytes(config: MoEConfig) -> int:
    """Bytes of the scales of one x row on the wire."""
    return {
        "none": 0,
        "token": 4,
        "ue8m0_32": config.hidden // 32,
        "block128": 4 * -(-config.hidden // 128),
    }[config.x_scales]


def _expert_bytes(config: MoEConfig) -> int:
    """Bytes of one expert, as a checkpoint holds it: without padding, scales at their own grain."""
    values = 3 * config.hidden * config.intermediate
    scales = {"bf16": 0, "fp8": 4 / 128**2, "fp8_block": 4 / 128**2, "mxfp4": 1 / 32}
    return int(values * (config.weight_bits / 8 + scales[config.recipe]))
