"""One MoE layer on two ranks in one kernel, against a plain float64 reference. Needs no GPU."""

import torch

from megamoe import CheckpointExperts, MegaMoE, MoEConfig, pack_weights, quantise_experts
from megamoe.reference import compare, moe_reference

RANKS, TOKENS, HIDDEN, EXPERTS, TOPK = 2, 8, 256, 8, 2
shape = {"hidden": HIDDEN, "intermediate": 256, "experts": EXPERTS, "topk": TOPK}
config = MoEConfig(**shape, ranks=RANKS, capacity=TOKENS, recipe="mxfp4")

torch.manual_seed(0)
gate, up, down = (torch.randn(EXPERTS, 256, 256).bfloat16() / 16 for _ in range(3))
checkpoint = CheckpointExperts.from_per_expert(gate_proj=gate, up_proj=up, down_proj=down)
experts = quantise_experts(checkpoint, "mxfp4")
weights = [pack_weights(config, experts, rank) for rank in range(RANKS)]
moe = MegaMoE(config=config, weights=weights, backend="interpreter")

x = [torch.randn(TOKENS, HIDDEN).bfloat16() for _ in range(RANKS)]
topk_weights, topk_idx = torch.randn(RANKS, TOKENS, EXPERTS).softmax(-1).topk(TOPK)
call = {"x": x, "topk_idx": list(topk_idx), "topk_weights": list(topk_weights)}
y = moe(**call)  # one launch on each rank
assert all(map(torch.equal, y, moe.chain(**call)))  # five launches, the same bits

gate, up, down = zip(*map(experts.dequantise, range(EXPERTS)), strict=True)
seen = torch.cat([moe.dequantised_x(rank) for rank in x])  # what the kernel multiplies
route = {"topk_idx": topk_idx.flatten(0, 1), "topk_weights": topk_weights.flatten(0, 1)}
expected = moe_reference(x=seen, **route, gate=gate, up=up, down=down, l1_output="e4m3")
print(compare(torch.cat(y), expected).check("mxfp4"))
