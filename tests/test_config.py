"""MoEConfig, the checks of a call's inputs, and the model shapes.

Why the grid is enough: every limit is tried on both sides (the last value allowed and the first
refused), every pair of recipe and x_scales is tried, and every refusal of validate_inputs is
provoked once with the figures that its message must name. Token counts go over 0..130, where
shape checks by bit tricks or by pointers fail. The checks read shapes and strides only, so small
sizes stand for all.
"""

import itertools

import pytest
import torch

from megamoe.config import (
    MODELS,
    RECIPES,
    X_SCALES,
    MegaMoEConfigError,
    MegaMoEInputError,
    MoEConfig,
    model_shape,
    validate_inputs,
)

SHAPE = {"hidden": 256, "intermediate": 128, "experts": 8, "topk": 2, "capacity": 32}


def config(**options) -> MoEConfig:
    return MoEConfig(**({"recipe": "bf16"} | SHAPE | options))


@pytest.mark.parametrize("recipe", RECIPES)
def test_x_scales_default_and_pairs(recipe):
    assert config(recipe=recipe).x_scales == X_SCALES[recipe][0]
    for x_scales in ("none", "token", "ue8m0_32", "block128"):
        if x_scales in X_SCALES[recipe]:
            assert config(recipe=recipe, x_scales=x_scales).x_scales == x_scales
        else:
            with pytest.raises(MegaMoEConfigError, match=f"'{x_scales}' does not go with"):
                config(recipe=recipe, x_scales=x_scales)


def test_derived_sizes():
    c = config(hidden=2880, intermediate=1408, ranks=4, recipe="mxfp4")
    assert (c.experts_per_rank, c.padded_hidden, c.padded_intermediate) == (2, 3072, 1536)
    assert (c.x_row_bytes, c.h_row_bytes, c.weight_bits) == (3072, 1536, 4)
    assert (c.x_scale_columns, c.x_scale_wire_columns) == (23, 24)
    assert c.x_scale_dtype == torch.int32
    c = config(hidden=2880, recipe="bf16")
    assert (c.x_row_bytes, c.x_scale_columns, c.x_scale_dtype) == (6144, 0, None)
    c = config(hidden=2880, recipe="fp8", x_scales="token")
    assert (c.x_scale_columns, c.x_scale_wire_columns, c.x_scale_dtype) == (1, 1, torch.float32)
    c = config(hidden=2880, recipe="fp8_block")
    assert (c.x_scale_columns, c.x_scale_wire_columns) == (23, 24)


LIMITS = [
    # field, allowed, refused, part of the message
    ("ranks", 72, 73, "at most 72"),
    ("topk", 32, 33, "at most 32"),
    ("hidden", 16384, 16384 + 8, "at most 16384"),
    ("capacity", 2**20, 2**20 + 1, "at most 1048576"),
    ("hidden", 8, 4, "multiple of 8"),
    ("intermediate", 8, 12, "multiple of 8"),
    ("intermediate", 14336, 0, "at least 1"),
    ("experts", 72, 0, "at least 1"),
    ("topk", 1, 0, "at least 1"),
    ("capacity", 1, 0, "at least 1"),
    ("ranks", 1, -1, "at least 1"),
    ("reserve_sms", 0, -1, "at least 0"),
    ("block_m", 128, 48, "16, 32, 64, 128"),
    ("clamp", 1e-3, 0, "greater than 0"),
    ("clamp", 7, float("inf"), "finite"),
    ("clamp", None, float("nan"), "finite"),
    ("timeout_s", 1, 0, "greater than 0"),
    ("activation", "swiglu", "relu2", "'relu2' is not supported"),
    ("recipe", "fp8", "fp4", "bf16, fp8, fp8_block, mxfp4"),
]


@pytest.mark.parametrize(("field", "allowed", "refused", "message"), LIMITS)
def test_limits(field, allowed, refused, message):
    assert getattr(config(**({"experts": 72} | {field: allowed})), field) == allowed
    with pytest.raises(MegaMoEConfigError, match=message):
        config(**({"experts": 72} | {field: refused}))


@pytest.mark.parametrize("value", [True, 8.0, "8", None])
@pytest.mark.parametrize("field", ["hidden", "experts", "capacity", "ranks"])
def test_sizes_are_integers(field, value):
    with pytest.raises(MegaMoEConfigError, match=f"{field} must be an integer, got {value!r}"):
        config(**{field: value})


@pytest.mark.parametrize(("experts", "ranks"), [(10, 4), (40, 16), (8, 3)])
def test_experts_must_divide(experts, ranks):
    with pytest.raises(MegaMoEConfigError, match=f"{experts} experts .* {ranks} ranks"):
        config(experts=experts, ranks=ranks)


def test_any_divisor_and_any_number_of_experts():
    for experts in (1, 3, 40, 160, 384, 512, 896):
        for ranks in range(1, 73):
            if experts % ranks == 0:
                c = config(experts=experts, ranks=ranks)
                assert c.experts_per_rank * ranks == experts


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4"])
def test_hidden_in_scale_blocks(recipe):
    with pytest.raises(MegaMoEConfigError, match="multiple of 32 .*got 264"):
        config(recipe=recipe, hidden=264)
    assert config(recipe=recipe, hidden=288).padded_hidden == 512


def test_topk_may_exceed_experts():
    assert config(experts=1, topk=32).topk == 32


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", MODELS)
def test_every_model_in_every_recipe(name, recipe):
    c = model_shape(name.upper()).config(capacity=8192, recipe=recipe, ranks=8)
    assert c.padded_intermediate % 256 == 0 and c.padded_intermediate >= c.intermediate
    assert c.clamp == (10.0 if "V4" in name else None)


def test_unknown_model_lists_the_known():
    with pytest.raises(MegaMoEConfigError, match="DeepSeek-V3.*gpt-oss-120b"):
        model_shape("GPT-1")


# --- inputs ------------------------------------------------------------------------------------


def inputs(tokens: int, c: MoEConfig, *, quantised: bool = False) -> dict[str, torch.Tensor]:
    given = {
        "x": torch.zeros(tokens, c.hidden, dtype=torch.bfloat16),
        "topk_idx": torch.zeros(tokens, c.topk, dtype=torch.int64),
        "topk_weights": torch.ones(tokens, c.topk),
    }
    if quantised:
        given["x"] = given["x"].to(torch.float8_e4m3fn)
        given["x_scale"] = torch.ones(tokens, c.x_scale_columns).to(c.x_scale_dtype)
    return given


def test_every_token_count_up_to_capacity():
    for capacity in (1, 32, 130):
        c = config(capacity=capacity)
        for tokens in range(131):
            if tokens <= capacity:
                assert len(validate_inputs(c, **inputs(tokens, c)).x) == tokens
            else:
                message = f"rank 3: {tokens} tokens > capacity {capacity}"
                with pytest.raises(MegaMoEInputError, match=message):
                    validate_inputs(c, rank=3, **inputs(tokens, c))


@pytest.mark.parametrize("tokens", [0, 1, 5])
@pytest.mark.parametrize("recipe", ["fp8", "fp8_block", "mxfp4"])
def test_quantised_x(recipe, tokens):
    for x_scales in X_SCALES[recipe]:
        c = config(recipe=recipe, x_scales=x_scales, hidden=288)
        good = inputs(tokens, c, quantised=True)
        assert validate_inputs(c, **good).x_scale is good["x_scale"]
        validate_inputs(c, **inputs(tokens, c))
        with pytest.raises(MegaMoEInputError, match="needs x_scale"):
            validate_inputs(c, **(good | {"x_scale": None}))
        with pytest.raises(MegaMoEInputError, match="must be .*got float64"):
            validate_inputs(c, **(good | {"x_scale": good["x_scale"].double()}))
        wide = torch.ones(tokens, 7).to(c.x_scale_dtype)
        with pytest.raises(MegaMoEInputError, match=rf"must have shape .*got \[{tokens}, 7\]"):
            validate_inputs(c, **(good | {"x_scale": wide}))
        with pytest.raises(MegaMoEInputError, match="only allowed with a float8"):
            validate_inputs(c, **(inputs(tokens, c) | {"x_scale": good["x_scale"]}))


def test_one_scale_per_token_in_both_shapes():
    c = config(recipe="fp8", x_scales="token")
    given = inputs(3, c, quantised=True)
    validate_inputs(c, **given)
    validate_inputs(c, **(given | {"x_scale": torch.ones(3)}))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("x", torch.zeros(4, 255, dtype=torch.bfloat16), r"\[tokens, 256\], got \[4, 255\]"),
        ("x", torch.zeros(256, dtype=torch.bfloat16), r"\[tokens, 256\], got \[256\]"),
        ("x", torch.zeros(4, 256), "must be bfloat16, got float32"),
        ("x", torch.zeros(4, 256).to(torch.float8_e4m3fn), "must be bfloat16, got float8_e4m3fn"),
        ("x", [[0.0]], "must be a torch.Tensor, got list"),
        ("topk_idx", torch.zeros(4, 3, dtype=torch.int64), r"shape \[4, 2\].*got \[4, 3\]"),
        ("topk_idx", torch.zeros(3, 2, dtype=torch.int64), r"shape \[4, 2\].*got \[3, 2\]"),
        ("topk_idx", torch.zeros(4, 2), "must be int32 or int64, got float32"),
        ("topk_weights", torch.zeros(4, 2).double(), "float32 or bfloat16 or float16, got float64"),
        ("topk_weights", torch.zeros(4), r"shape \[4, 2\].*got \[4\]"),
        ("topk_weights", torch.zeros(4, 2, device="meta"), "is on meta, but x is on cpu"),
    ],
)
def test_refused_inputs(name, value, message):
    c = config()
    with pytest.raises(MegaMoEInputError, match=f"{name} .*{message}|{name} {message}"):
        validate_inputs(c, **(inputs(4, c) | {name: value}))


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights", "x_scale"])
@pytest.mark.parametrize("how", ["transposed", "expanded", "sliced"])
def test_strides(name, how):
    c = config(recipe="fp8", hidden=512)
    given = inputs(4, c, quantised=True)
    tensor = given[name]
    changed = {
        "transposed": lambda: tensor.T.contiguous().T,
        "expanded": lambda: tensor[:1].expand(4, -1),
        "sliced": lambda: torch.cat((tensor, tensor), dim=1)[:, : tensor.shape[1]],
    }[how]()
    assert changed.shape == tensor.shape
    strides = list(changed.stride())
    with pytest.raises(MegaMoEInputError) as raised:
        validate_inputs(c, **(given | {name: changed}))
    assert f"{name} must be contiguous" in str(raised.value)
    assert f"strides {strides}" in str(raised.value)


def test_rows_of_a_larger_tensor_and_empty_slices_are_fine():
    c = config()
    given = {name: tensor[2:5] for name, tensor in inputs(8, c).items()}
    assert len(validate_inputs(c, **given).x) == 3
    given = {name: tensor[4:4] for name, tensor in inputs(8, c).items()}
    assert len(validate_inputs(c, **given).x) == 0


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids(dtype):
    c = config()
    for good in (-1, 0, 7):
        given = inputs(4, c)
        given["topk_idx"] = torch.full((4, 2), good, dtype=dtype)
        validate_inputs(c, **given)
    large = [2**31 + 1, -(2**40)] if dtype == torch.int64 else []
    for bad, (row, slot) in itertools.product([8, -2, *large], [(0, 0), (3, 1)]):
        given = inputs(4, c)
        given["topk_idx"] = torch.zeros(4, 2, dtype=dtype)
        given["topk_idx"][row, slot] = bad
        given["topk_idx"][3, 1] = bad
        with pytest.raises(MegaMoEInputError) as raised:
            validate_inputs(c, **given)
        assert f"topk_idx[{row}, {slot}] is {bad}:" in str(raised.value)
        assert "between 0 and 7" in str(raised.value)
        validate_inputs(c, check_ids=False, **given)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_router_weights_become_float32(dtype):
    c = config()
    given = inputs(4, c)
    given["topk_weights"] = torch.full((4, 2), 0.3).to(dtype)
    weights = validate_inputs(c, **given).topk_weights
    assert weights.dtype == torch.float32
    assert torch.equal(weights, given["topk_weights"].float())
