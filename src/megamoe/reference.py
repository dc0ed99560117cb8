"""The oracle: one MoE layer in plain float64, and how far a result is from it.

Written from the definition of the layer alone; it shares no code with the kernel or with formats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

Experts = Sequence[torch.Tensor] | torch.Tensor | Callable[[int], torch.Tensor]
L1_OUTPUTS = ("float", "bf16", "e4m3")


def moe_reference(
    *,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    gate: Experts,
    up: Experts,
    down: Experts,
    clamp: float | None = None,
    l1_output: str = "float",
    h_group: int = 64,
    dtype: torch.dtype = torch.float64,
    partial_bf16: bool = True,
) -> torch.Tensor:
    """y [t, H] (dtype): sum over slots of down @ (silu(gate x) * (up x) * router weight).

    x [t, H]: the (dequantised) tokens of all ranks, any float type. topk_idx [t, k]: -1 skips the
    slot; the same expert twice in a token is two slots. topk_weights [t, k].
    gate, up [I, H], down [H, I] per expert: a sequence, a stacked tensor, or a function of the
    expert's number (called once for each expert that has tokens, so layers need not fit in memory).
    clamp c: gate <= c and -c <= up <= c before the activation.
    l1_output: what L2 reads: "float" (unrounded), "bf16", or "e4m3" with one power-of-two scale per
    (token, h_group columns), the smallest s with amax <= 448 s.
    partial_bf16: a slot's output is rounded to bf16 before the sum. The sum itself, in ascending
    slot order, is not rounded to bf16.
    """
    if l1_output not in L1_OUTPUTS:
        raise ValueError(f"l1_output must be one of {', '.join(L1_OUTPUTS)}, got {l1_output!r}")
    if x.dim() != 2 or topk_idx.shape != topk_weights.shape or len(topk_idx) != len(x):
        raise ValueError(
            "expected x [t, H], topk_idx [t, k] and topk_weights [t, k], got "
            f"{list(x.shape)}, {list(topk_idx.shape)}, {list(topk_weights.shape)}"
        )
    x = x.to(dtype)
    partial_dtype = torch.bfloat16 if partial_bf16 else dtype
    partials = torch.zeros(*topk_idx.shape, x.shape[1], dtype=partial_dtype, device=x.device)
    for expert in topk_idx[topk_idx >= 0].unique().tolist():
        token, slot = (topk_idx == expert).nonzero(as_tuple=True)
        matrices = (_matrix(experts, expert, dtype) for experts in (gate, up))
        h = _activate(x[token], *matrices, topk_weights[token, slot].to(dtype), clamp)
        h = _round_l1_output(h, l1_output, h_group)
        partials[token, slot] = (h @ _matrix(down, expert, dtype).T).to(partial_dtype)
    y = torch.zeros_like(x)
    for slot in range(topk_idx.shape[1]):
        y += partials[:, slot].to(dtype)
    return y


def _matrix(experts: Experts, expert: int, dtype: torch.dtype) -> torch.Tensor:
    matrix = experts(expert) if callable(experts) else experts[expert]
    return matrix.to(dtype)


def _activate(
    x: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    router_weight: torch.Tensor,
    clamp: float | None,
) -> torch.Tensor:
    g, u = x @ gate.T, x @ up.T
    if clamp is not None:
        g = torch.clamp(g, max=clamp)
        u = torch.clamp(u, min=-clamp, max=clamp)
    return g / (1 + torch.exp(-g)) * u * router_weight[:, None]


def _round_l1_output(h: torch.Tensor, l1_output: str, h_group: int) -> torch.Tensor:
    if l1_output == "float":
        return h
    if l1_output == "bf16":
        return h.to(torch.bfloat16).to(h.dtype)
    return _round_e4m3_groups(h, h_group)


def _round_e4m3_groups(h: torch.Tensor, group: int) -> torch.Tensor:
    """h rounded to e4m3 times a power of two per (row, group columns); NaN and Inf become NaN."""
    rows, columns = h.shape
    values = torch.zeros(rows, math.ceil(columns / group) * group, dtype=torch.float32)
    values = values.to(h.device)
    values[:, :columns] = h.to(torch.float32)
    grouped = values.reshape(rows, -1, group)
    usable = torch.where(grouped.isfinite(), grouped, 0.0)
    # amax = m * 2^x with 0.5 <= m < 1, and 448 = 0.875 * 2^9.
    m, x = torch.frexp(usable.abs().amax(-1, keepdim=True))
    exponent = torch.clamp(x - 9 + (m > 0.875).int(), min=-126)
    scaled = torch.ldexp(usable, -exponent)
    rounded = torch.ldexp(scaled.to(torch.float8_e4m3fn).to(torch.float32), exponent)
    rounded = torch.where(grouped.isfinite(), rounded, math.nan)
    return rounded.reshape(rows, -1)[:, :columns].to(h.dtype)


# --- comparing ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Bound:
    """Largest accepted errors against the reference, and why they are that large."""

    relative_l2: float
    worst_row: float
    reason: str


# Kernel against moe_reference with the same quantised inputs and weights and the same l1_output.
# The figures come from a simulation: relative noise of 0.0017 on L1's output (the error of one FP8
# product on Hopper, whose accumulator keeps about 14 bits within 128 of K) gives 0.0036 for bf16
# and 0.010 (worst row of 64: 0.025) with an e4m3 L1 output; fp32 sums alone give 0.0017.
_FLIPS = (
    "errors of the sums move some values of L1's output across an e4m3 rounding boundary, each of "
    "them then changes by up to 1/8; the partials and y are bf16"
)
BOUNDS: dict[str, Bound] = {
    "bf16": Bound(5e-3, 1e-2, "partials and y are bf16 (0.0017 rms together), sums are fp32"),
    "fp8": Bound(1.5e-2, 5e-2, _FLIPS),
    "fp8_block": Bound(1.5e-2, 5e-2, _FLIPS),
    "mxfp4": Bound(1.5e-2, 5e-2, _FLIPS),
}


class ComparisonError(AssertionError):
    """A result is further from the reference than its bound allows."""


@dataclass(frozen=True)
class Comparison:
    """How far `actual` is from `expected`, whatever their scale.

    relative_l2: |actual - expected| / |expected| over the rows where expected is finite and not
    zero. cosine: of the same rows, flattened. worst_row_relative: the largest relative L2 error of
    one such row, at row worst_row. bad_zero_rows: rows that should be exactly zero and are not.
    bad_nonfinite_rows: rows that are finite in one of the two only. finite: actual has no NaN, Inf.
    """

    rows: int
    relative_l2: float
    cosine: float
    worst_row_relative: float
    worst_row: int
    bad_zero_rows: int
    bad_nonfinite_rows: int
    finite: bool

    def problems(self, bound: Bound) -> list[str]:
        """What is wrong, in words; empty when the result is within the bound."""
        found = []
        if self.bad_nonfinite_rows:
            found.append(f"{self.bad_nonfinite_rows} of {self.rows} rows differ in NaN or Inf")
        if self.bad_zero_rows:
            found.append(f"{self.bad_zero_rows} of {self.rows} rows should be exactly zero")
        # "not <=" so that a NaN fails.
        if not self.relative_l2 <= bound.relative_l2:
            found.append(f"relative L2 error {self.relative_l2:.3g} > {bound.relative_l2:.3g}")
        if not self.worst_row_relative <= bound.worst_row:
            found.append(
                f"relative error {self.worst_row_relative:.3g} > {bound.worst_row:.3g} in row "
                f"{self.worst_row}"
            )
        return found

    def check(self, bound: Bound | str) -> Comparison:
        """Itself when within the bound (a recipe's name takes BOUNDS); else ComparisonError."""
        bound = BOUNDS[bound] if isinstance(bound, str) else bound
        problems = self.problems(bound)
        if problems:
            raise ComparisonError("; ".join(problems) + f" (cosine {self.cosine:.6f})")
        return self


def compare(actual: torch.Tensor, expected: torch.Tensor) -> Comparison:
    """Compare a result [t, H] with the reference [t, H], in float64. Shapes must be equal."""
    if actual.shape != expected.shape or actual.dim() != 2:
        raise ValueError(
            f"expected two tensors [t, H] of one shape, got {list(actual.shape)} and "
            f"{list(expected.shape)}"
        )
    a, e = actual.to(torch.float64), expected.to(torch.float64).to(actual.device)
    a_finite, e_finite = a.isfinite().all(1), e.isfinite().all(1)
    zero = e_finite & (e == 0).all(1)
    used = a_finite & e_finite & ~zero
    rows = used.nonzero().flatten()
    a_used, e_used = a[used], e[used]
    errors = (a_used - e_used).norm(dim=1) / e_used.norm(dim=1)
    worst = int(errors.argmax()) if len(rows) else -1
    return Comparison(
        rows=len(a),
        relative_l2=_ratio((a_used - e_used).norm(), e_used.norm()),
        cosine=_cosine(a_used.flatten(), e_used.flatten()),
        worst_row_relative=float(errors[worst]) if len(rows) else 0.0,
        worst_row=int(rows[worst]) if len(rows) else -1,
        bad_zero_rows=int((a[zero] != 0).any(1).sum()),
        bad_nonfinite_rows=int((a_finite != e_finite).sum()),
        finite=bool(a_finite.all()),
    )


def _ratio(error: torch.Tensor, size: torch.Tensor) -> float:
    return float(error / size) if size > 0 else 0.0


def _cosine(a: torch.Tensor, e: torch.Tensor) -> float:
    """1.0 when there is nothing to compare, 0.0 when only a is zero."""
    if not len(e):
        return 1.0
    sizes = float(a.norm() * e.norm())
    return float(a @ e) / sizes if sizes > 0 else 0.0
