"""The oracle against loops written from the definition, closed forms, and a trained model's layer.

Why the grid is enough: the oracle is one formula, so a few small shapes with every feature on and
off (clamp, skipped slots, repeated experts, the three L1 outputs, both sums) pin it, against
scalar loops over Python floats; clamp is tried on both sides of its edges; the e4m3 rounding is
compared with a table over ties, exact powers and non-finite values. The captured layers of the
trained model check the whole against outputs that another implementation made.
"""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from megamoe.checkpoint import CheckpointExperts
from megamoe.reference import compare, moe_reference

SEED = 5
TINY = Path(__file__).parents[1] / "examples" / "tiny-moe"


def layer(t=7, hidden=16, intermediate=12, experts=5, topk=3, seed=SEED) -> dict:
    g = torch.Generator().manual_seed(seed)
    return {
        "x": torch.randn(t, hidden, generator=g),
        "topk_idx": torch.randint(-1, experts, (t, topk), generator=g),
        "topk_weights": torch.rand(t, topk, generator=g),
        "gate": torch.randn(experts, intermediate, hidden, generator=g),
        "up": torch.randn(experts, intermediate, hidden, generator=g),
        "down": torch.randn(experts, hidden, intermediate, generator=g),
    }


def to_bf16(value: float) -> float:
    return torch.tensor(value, dtype=torch.float64).to(torch.bfloat16).item()


def by_loops(given: dict, clamp: float | None, l1_bf16: bool, partial_bf16: bool) -> torch.Tensor:
    x, gate, up, down = (given[n].double().tolist() for n in ("x", "gate", "up", "down"))
    rows = []
    for token, (ids, weights) in enumerate(
        zip(given["topk_idx"].tolist(), given["topk_weights"].double().tolist(), strict=True)
    ):
        total = [0.0] * len(x[token])
        for expert, weight in zip(ids, weights, strict=True):
            if expert < 0:
                continue
            h = []
            for g_row, u_row in zip(gate[expert], up[expert], strict=True):
                g = math.fsum(a * b for a, b in zip(g_row, x[token], strict=True))
                u = math.fsum(a * b for a, b in zip(u_row, x[token], strict=True))
                if clamp is not None:
                    g, u = min(g, clamp), max(-clamp, min(u, clamp))
                value = g / (1 + math.exp(-g)) * u * weight
                h.append(to_bf16(value) if l1_bf16 else value)
            for i, d_row in enumerate(down[expert]):
                part = math.fsum(a * b for a, b in zip(d_row, h, strict=True))
                total[i] += to_bf16(part) if partial_bf16 else part
        rows.append(total)
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("clamp", [None, 1.0])
@pytest.mark.parametrize("partial_bf16", [False, True])
@pytest.mark.parametrize("l1_output", ["float", "bf16"])
def test_against_loops(l1_output, partial_bf16, clamp):
    given = layer()
    y = moe_reference(**given, clamp=clamp, l1_output=l1_output, partial_bf16=partial_bf16)
    assert y.dtype == torch.float64
    expected = by_loops(given, clamp, l1_output == "bf16", partial_bf16)
    torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", ["list", "function"])
def test_experts_as_list_or_function(kind):
    given = layer()
    expected = moe_reference(**given)
    used = []
    for name in ("gate", "up", "down"):
        stacked = given[name]

        def load(expert: int, stacked=stacked, name=name) -> torch.Tensor:
            used.append((name, expert))
            return stacked[expert]

        given[name] = list(stacked) if kind == "list" else load
    assert torch.equal(moe_reference(**given), expected)
    if kind == "function":
        ids = sorted(set(given["topk_idx"].flatten().tolist()) - {-1})
        assert sorted(used) == sorted((n, e) for n in ("gate", "up", "down") for e in ids)


def test_skipped_slots():
    given = layer(experts=3)
    given["topk_idx"] = torch.tensor([[-1, -1, -1], [2, -1, 0], [0, 2, -1]] + [[1, 1, 1]] * 4)
    given["topk_weights"][0] = float("nan")
    given["topk_weights"][1, 1] = float("inf")
    y = moe_reference(**given)
    assert (y[0] == 0).all() and y.isfinite().all()
    given["topk_idx"] = torch.full((7, 3), -1)
    assert torch.equal(moe_reference(**given), torch.zeros(7, 16, dtype=torch.float64))


@pytest.mark.parametrize("t", [0, 1])
def test_few_tokens(t):
    given = layer(t=t)
    assert moe_reference(**given).shape == (t, 16)


def test_repeated_experts_are_slots_of_their_own():
    given = layer(topk=6, experts=128)
    given["topk_idx"] = torch.tensor([[121, 62, 117, 62, 32, 13]] * 6 + [[5] * 6])
    y = moe_reference(**given, partial_bf16=False)
    single = {**given, "topk_idx": given["topk_idx"][:, :1]}
    apart = sum(
        moe_reference(
            **{
                **single,
                "topk_idx": given["topk_idx"][:, s : s + 1],
                "topk_weights": given["topk_weights"][:, s : s + 1],
            },
            partial_bf16=False,
        )
        for s in range(6)
    )
    torch.testing.assert_close(y, apart, rtol=1e-13, atol=1e-13)


def one_column(gate: float, up: float, clamp: float | None) -> float:
    """A layer of one token, one expert, H = I = 1 whose pre-activations are gate and up."""
    return moe_reference(
        x=torch.ones(1, 1),
        topk_idx=torch.zeros(1, 1, dtype=torch.int64),
        topk_weights=torch.ones(1, 1),
        gate=torch.full((1, 1, 1), gate, dtype=torch.float64),
        up=torch.full((1, 1, 1), up, dtype=torch.float64),
        down=torch.ones(1, 1, 1),
        clamp=clamp,
        partial_bf16=False,
    ).item()


EDGES = [9.99, 10.0, 10.01, 1e4]


@pytest.mark.parametrize("up", EDGES + [-e for e in EDGES])
@pytest.mark.parametrize("gate", EDGES + [-e for e in EDGES])
def test_clamp_edges(gate, up):
    g, u = min(gate, 10.0), max(-10.0, min(10.0, up))
    silu = g / (1 + math.exp(-g)) if g > -700 else 0.0
    assert one_column(gate, up, 10.0) == pytest.approx(silu * u, rel=1e-13)
    if gate > 0:
        free = gate / (1 + math.exp(-gate)) * up
        assert one_column(gate, up, None) == pytest.approx(free, rel=1e-13)
        # The clamp has an effect exactly where a pre-activation is beyond it.
        beyond = gate > 10 or abs(up) > 10
        assert (one_column(gate, up, 10.0) != one_column(gate, up, None)) == beyond


# --- the e4m3 output of L1 ---------------------------------------------------------------------


def rounded_h(h: torch.Tensor, group: int = 64) -> torch.Tensor:
    """What L2 reads when the activation of one token is h: gate is large, so silu(gate) = gate."""
    columns = len(h)
    first = torch.eye(columns)[0]
    return moe_reference(
        x=first[None],
        topk_idx=torch.zeros(1, 1, dtype=torch.int64),
        topk_weights=torch.full((1, 1), 2.0**-10),
        gate=1024 * first.expand(1, columns, columns),
        up=(h[:, None] * first)[None],
        down=torch.eye(columns)[None],
        l1_output="e4m3",
        h_group=group,
        partial_bf16=False,
    )[0]


def e4m3_grid() -> torch.Tensor:
    small = [m * 2.0**-9 for m in range(8)]
    normal = [(8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8)]
    return torch.tensor(small + normal[:-1], dtype=torch.float64)


def by_table(h: torch.Tensor, group: int = 64) -> torch.Tensor:
    grid = e4m3_grid()
    result = []
    for start in range(0, len(h), group):
        part = h[start : start + group].double()
        e = -126
        while part.abs().max() > 448 * 2.0**e:
            e += 1
        distance = (part.abs()[:, None] / 2.0**e - grid).abs()
        best = distance.min(1, keepdim=True).values == distance
        index = torch.arange(len(grid))
        # Of two equally near values the one with the even code.
        pick = (best * (2 - index % 2)).argmax(1)
        result.append(grid[pick] * part.sign() * 2.0**e)
    return torch.cat(result)


@pytest.mark.parametrize("columns", [1, 64, 72, 200])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e20])
def test_e4m3_output_against_a_table(columns, magnitude):
    g = torch.Generator().manual_seed(SEED)
    h = torch.randn(columns, generator=g) * magnitude
    assert torch.equal(rounded_h(h), by_table(h))


def test_e4m3_output_on_ties_and_powers():
    grid = e4m3_grid().float()
    ties = (grid[1:] + grid[:-1]) / 2
    for values in (grid, ties, -ties):
        for start in range(0, len(values), 63):
            part = values[start : start + 63]
            h = torch.cat((torch.tensor([448.0]), part))
            assert torch.equal(rounded_h(h), by_table(h))
    for n in (-30, 0, 30):
        exact = torch.tensor([448.0 * 2.0**n])
        above = exact.nextafter(torch.tensor(float("inf")))
        assert rounded_h(exact).item() == 448.0 * 2.0**n
        small = torch.tensor([2.0**-9 * 2.0**n])
        # One step beyond 448 doubles the scale, so that the smallest value is lost.
        assert rounded_h(torch.cat((exact, small)))[1].item() == small.item()
        assert rounded_h(torch.cat((above, small)))[1].item() == 0


def test_e4m3_output_zero_and_groups():
    h = torch.zeros(128)
    assert (rounded_h(h) == 0).all()
    h[3], h[64] = 448.0, 2.0**-20
    assert torch.equal(rounded_h(h), h.double())
    assert rounded_h(h, group=128)[64] == 0


@pytest.mark.parametrize("l1_output", ["float", "bf16", "e4m3"])
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_poisoned_token_changes_itself_only(poison, l1_output):
    given = layer(intermediate=128)
    given["topk_idx"][2] = torch.tensor([0, -1, 3])
    clean = moe_reference(**given, l1_output=l1_output)
    given["x"][2, 5] = poison
    y = moe_reference(**given, l1_output=l1_output)
    others = torch.arange(7) != 2
    assert torch.equal(y[others], clean[others])
    assert not y[2].isfinite().any()


def test_float32_is_close_to_float64():
    given = layer(t=32, hidden=64, intermediate=128)
    for l1_output in ("float", "bf16", "e4m3"):
        wide = moe_reference(**given, l1_output=l1_output)
        narrow = moe_reference(**given, l1_output=l1_output, dtype=torch.float32)
        assert narrow.dtype == torch.float32
        assert compare(narrow, wide).check("bf16").relative_l2 < 2e-3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"l1_output": "fp8"}, "float, bf16, e4m3, got 'fp8'"),
        ({"topk_idx": torch.zeros(6, 3, dtype=torch.int64)}, r"\[7, 16\], \[6, 3\], \[7, 3\]"),
        ({"x": torch.zeros(16)}, "expected x"),
    ],
)
def test_refused(change, message):
    with pytest.raises(ValueError, match=message):
        moe_reference(**(layer() | change))


@pytest.mark.skipif(not TINY.is_dir(), reason="examples/tiny-moe is not in this copy")
@pytest.mark.parametrize("number", range(4))
def test_a_trained_models_layers(number):
    source = CheckpointExperts.from_safetensors(TINY, number)
    inputs = load_file(TINY / "layer_inputs.safetensors")
    y = moe_reference(
        x=inputs[f"layers.{number}.hidden_states"],
        topk_idx=inputs[f"layers.{number}.topk_indices"],
        topk_weights=inputs[f"layers.{number}.topk_weights"],
        gate=lambda e: source.expert(e).gate,
        up=lambda e: source.expert(e).up,
        down=lambda e: source.expert(e).down,
        partial_bf16=False,
    )
    result = compare(y, inputs[f"layers.{number}.output"])
    # The captured outputs are fp32 sums over at most 256 products.
    assert result.relative_l2 < 1e-6 and result.worst_row_relative < 2e-6 and result.finite
