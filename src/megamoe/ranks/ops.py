"""The forward as torch custom ops, so that torch.compile(fullgraph=True) takes it as one node.

`order` is a small tensor that each object owns and every call claims to change: it keeps calls in
their order and from being dropped or merged, as each must happen once on every rank.
"""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

import torch

if TYPE_CHECKING:
    from megamoe.distributed import SymmetricMoE

# an op takes only tensors and numbers: the number of an object leads back to it
_OBJECTS: WeakValueDictionary[int, SymmetricMoE] = WeakValueDictionary()

_ARGUMENTS = (
    "Tensor? x, Tensor? x_scale, Tensor? topk_idx, Tensor? topk_weights, SymInt tokens, "
    "Tensor w1, Tensor w2, Tensor? w1_scale, Tensor? w2_scale, Tensor? w1_offset, "
    "Tensor? w2_offset, bool chain, int moe"
)
NAMES = ("w1", "w2", "w1_scale", "w2_scale", "w1_offset", "w2_offset")


def register(moe: SymmetricMoE) -> int:
    """The number by which ops find `moe` while it lives."""
    number = id(moe)
    _OBJECTS[number] = moe
    return number


def _find(number: int) -> SymmetricMoE:
    moe = _OBJECTS.get(number)
    if moe is None:
        raise RuntimeError("the SymmetricMoE that this was compiled for no longer exists")
    return moe


def _run(out, x, x_scale, topk_idx, topk_weights, tokens, weights, chain, moe):
    given = {n: w for n, w in zip(NAMES, weights, strict=True) if w is not None}
    _find(moe).run(
        given, x, x_scale, topk_idx, topk_weights, tokens=int(tokens), out=out, chain=chain
    )


@torch.library.custom_op(
    "megamoe::forward",
    mutates_args=("order",),
    schema=f"(Tensor(a!) order, int hidden, {_ARGUMENTS}) -> Tensor",
)
def forward(
    order, hidden, x, x_scale, topk_idx, topk_weights, tokens, w1, w2, w1_scale, w2_scale,
    w1_offset, w2_offset, chain, moe,
):  # fmt: skip
    """y bf16 [tokens, hidden] of one rank; see :meth:`megamoe.distributed.SymmetricMoE.forward`."""
    out = order.new_empty((tokens, hidden), dtype=torch.bfloat16)
    weights = (w1, w2, w1_scale, w2_scale, w1_offset, w2_offset)
    _run(out, x, x_scale, topk_idx, topk_weights, tokens, weights, chain, moe)
    return out


@forward.register_fake
def _(
    order, hidden, x, x_scale, topk_idx, topk_weights, tokens, w1, w2, w1_scale, w2_scale,
    w1_offset, w2_offset, chain, moe,
):  # fmt: skip
    return order.new_empty((tokens, hidden), dtype=torch.bfloat16)


@torch.library.custom_op(
    "megamoe::forward_out",
    mutates_args=("order", "out"),
    schema=f"(Tensor(a!) order, Tensor(b!) out, {_ARGUMENTS}) -> ()",
)
def forward_out(
    order, out, x, x_scale, topk_idx, topk_weights, tokens, w1, w2, w1_scale, w2_scale,
    w1_offset, w2_offset, chain, moe,
):  # fmt: skip
    """As :func:`forward`, into `out`."""
    weights = (w1, w2, w1_scale, w2_scale, w1_offset, w2_offset)
    _run(out, x, x_scale, topk_idx, topk_weights, tokens, weights, chain, moe)


@forward_out.register_fake
def _(
    order, out, x, x_scale, topk_idx, topk_weights, tokens, w1, w2, w1_scale, w2_scale,
    w1_offset, w2_offset, chain, moe,
):  # fmt: skip
    return None
