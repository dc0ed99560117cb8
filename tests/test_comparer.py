"""The comparison that judges every other result must itself reject wrong results.

Why the grid is enough: each way in which a wrong output has passed for a right one (rows shuffled,
a row missing, scaled, zero, sign, NaN, a zero row written) is tried at three magnitudes of output,
1e-5, 1 and 1e5, against every recipe's bound; and right results of the same magnitudes pass.
"""

import pytest
import torch

from megamoe.reference import BOUNDS, Bound, ComparisonError, compare


def expected_output(magnitude: float) -> torch.Tensor:
    y = torch.randn(32, 64, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    y[5] = 0
    y[6] *= 1e-3
    return y * magnitude


def wrong_outputs(y: torch.Tensor) -> dict[str, torch.Tensor]:
    def changed(row, value) -> torch.Tensor:
        result = y.clone()
        result[row] = value
        return result

    return {
        "shuffled": y[torch.randperm(len(y), generator=torch.Generator().manual_seed(1))],
        "shifted by a row": y.roll(1, dims=0),
        "two rows swapped": changed([1, 2], y[[2, 1]]),
        "columns shifted": y.roll(1, dims=1),
        "scaled by 1.06": y * 1.06,
        "halved": y / 2,
        "negated": -y,
        "zero": torch.zeros_like(y),
        "one row zero": changed(9, 0.0),
        "a small row wrong": changed(6, y[6] * 1.5),
        "one row doubled": changed(9, 2 * y[9]),
        "NaN everywhere": torch.full_like(y, float("nan")),
        "one NaN": changed((3, 3), float("nan")),
        "one Inf": changed((3, 3), float("inf")),
        "a zero row written": changed((5, 0), 1e-30),
        "NaN in a zero row": changed((5, 0), float("nan")),
    }


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("magnitude", [1e-5, 1.0, 1e5])
@pytest.mark.parametrize("fault", wrong_outputs(torch.zeros(32, 64)))
def test_wrong_outputs_fail(fault, magnitude, recipe):
    y = expected_output(magnitude)
    with pytest.raises(ComparisonError):
        compare(wrong_outputs(y)[fault], y).check(recipe)


@pytest.mark.parametrize("recipe", BOUNDS)
@pytest.mark.parametrize("magnitude", [1e-5, 1.0, 1e5])
def test_right_outputs_pass(magnitude, recipe):
    y = expected_output(magnitude)
    assert compare(y, y).check(recipe).relative_l2 == 0
    rounded = compare(y.to(torch.bfloat16), y).check(recipe)
    assert 1e-4 < rounded.relative_l2 < 3e-3
    assert rounded.cosine > 0.99999
    assert rounded.finite


def test_metrics_are_those_of_the_definition():
    expected = torch.tensor([[3.0, 4.0], [0.0, 10.0]])
    actual = torch.tensor([[3.0, 4.0], [0.0, 11.0]])
    result = compare(actual, expected)
    assert result.relative_l2 == pytest.approx(1 / 125**0.5)
    assert result.worst_row_relative == pytest.approx(0.1)
    assert result.worst_row == 1
    assert result.cosine == pytest.approx((25 + 110) / (125 * 146) ** 0.5)


def test_message_names_row_and_figures():
    y = expected_output(1.0)
    wrong = y.clone()
    wrong[9] *= 2
    with pytest.raises(ComparisonError, match=r"relative error 1 > 0\.01 in row 9"):
        compare(wrong, y).check(Bound(10.0, 0.01, "only the row counts"))


def test_nan_rows_that_are_expected():
    y = expected_output(1.0)
    y[4, 1] = float("nan")
    result = compare(y, y).check("bf16")
    assert not result.finite
    hidden = y.clone()
    hidden[4] = 0
    with pytest.raises(ComparisonError, match="1 of 32 rows differ in NaN"):
        compare(hidden, y).check("bf16")


def test_nothing_to_compare():
    assert compare(torch.zeros(0, 8), torch.zeros(0, 8)).check("bf16").rows == 0
    assert compare(torch.zeros(3, 8), torch.zeros(3, 8)).check("bf16").relative_l2 == 0


def test_shapes_must_agree():
    with pytest.raises(ValueError, match=r"got \[1, 8\] and \[4, 8\]"):
        compare(torch.zeros(1, 8), torch.zeros(4, 8))


def test_bounds_have_reasons():
    assert set(BOUNDS) == {"bf16", "fp8", "fp8_block", "mxfp4"}
    for bound in BOUNDS.values():
        assert bound.relative_l2 < bound.worst_row < 0.06
        assert len(bound.reason) > 20
