"""Checkpoint layouts, model folders and quantisers.

Why the grid is enough: experts are read and quantised one by one, so four stand for all, and the
three matrices of each are compared bit by bit with those that were written. Every kind, both fused
layouts, every naming of a model folder, and every refusal occur. Quantisers are checked block by
block from their definition, on shapes with short last blocks in either dimension and in both.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from random_experts import checkpoint, fused, generator, random_experts, raw
from safetensors.torch import save_file

from megamoe import formats
from megamoe.checkpoint import (
    CheckpointExperts,
    WeightsError,
    dequantise,
    diagnose_gate_up,
    moe_layers,
    quantise_e4m3_128x128,
    quantise_experts,
)

# --- quantisers --------------------------------------------------------------------------------


@pytest.mark.parametrize("power_of_two", [True, False])
@pytest.mark.parametrize("shape", [(128, 128), (136, 288), (8, 40), (300, 512)])
def test_128x128_blocks(shape, power_of_two):
    weight = torch.randn(*shape, generator=generator())
    weight[:128, :128] *= 1e-3
    values, scales = quantise_e4m3_128x128(weight, power_of_two_scales=power_of_two)
    assert values.shape == shape and values.dtype == torch.float8_e4m3fn
    assert scales.shape == (-(-shape[0] // 128), -(-shape[1] // 128))
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            amax, s = weight[block].abs().max(), scales[i, j]
            if power_of_two:
                assert torch.frexp(s)[0] == 0.5 and amax <= 448 * s and amax > 224 * s
            else:
                assert s == amax / 448
            assert torch.equal(raw(values[block]), raw(formats.encode_e4m3(weight[block] / s)))


def test_quantise_experts_names_what_is_wrong():
    source = checkpoint(256, 256)
    assert quantise_experts(source, "bf16") is source
    with pytest.raises(WeightsError, match="got 'int8'"):
        quantise_experts(source, "int8")
    with pytest.raises(WeightsError, match="these are mxfp4"):
        quantise_experts(quantise_experts(source, "mxfp4"), "fp8")


# --- checkpoint layouts ------------------------------------------------------------------------


def test_fused_quantised_layouts():
    w = random_experts(256, 128)
    mx = formats.quantise_e2m1(fused(w, "interleaved"))
    down = formats.quantise_e2m1(w.down)
    source = CheckpointExperts.from_fused(
        gate_up=mx.values.view(torch.int8),
        down=down.values,
        layout="interleaved",
        gate_up_scale=mx.scales.view(torch.float8_e8m0fnu),
        down_scale=down.scales,
    )
    expected = quantise_experts(checkpoint(256, 128), "mxfp4")
    for ours, theirs in zip(source.dequantise(2), expected.dequantise(2), strict=True):
        assert torch.equal(ours, theirs)
    fp8 = [quantise_e4m3_128x128(m, power_of_two_scales=True) for m in fused(w, "halves")]
    fp8_down = [quantise_e4m3_128x128(m, power_of_two_scales=True) for m in w.down]
    given = {
        "gate_up": [q.values for q in fp8],
        "down": [q.values for q in fp8_down],
        "gate_up_scale": [q.scales.to(torch.bfloat16) for q in fp8],
        "down_scale": [q.scales.to(torch.float8_e8m0fnu) for q in fp8_down],
    }
    source = CheckpointExperts.from_fused(layout="halves", **given)
    expected = quantise_experts(checkpoint(256, 128), "fp8")
    for ours, theirs in zip(source.dequantise(3), expected.dequantise(3), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(WeightsError, match="hold gate and up rows together"):
        CheckpointExperts.from_fused(layout="interleaved", **given)


def test_layout_must_be_named():
    w = random_experts(256, 128)
    with pytest.raises(TypeError, match="layout"):
        CheckpointExperts.from_fused(gate_up=fused(w, "halves"), down=w.down)
    with pytest.raises(WeightsError, match="halves or interleaved, got 'auto'"):
        CheckpointExperts.from_fused(gate_up=fused(w, "halves"), down=w.down, layout="auto")


@pytest.mark.parametrize("stored", ["halves", "interleaved"])
@pytest.mark.parametrize("clamp", [None, 1.0])
def test_a_wrong_layout_is_found_from_one_known_output(stored, clamp):
    w = random_experts(256, 128)
    x = torch.randn(8, 256, generator=generator())
    g, u = x @ w.gate[1].float().T, x @ w.up[1].float().T
    if clamp:
        g, u = g.clamp(max=clamp), u.clamp(-clamp, clamp)
    y = (torch.sigmoid(g) * g * u) @ w.down[1].float().T
    for named in ("halves", "interleaved"):
        source = CheckpointExperts.from_fused(gate_up=fused(w, stored), down=w.down, layout=named)
        errors = diagnose_gate_up(source, expert=1, x=x, y=y, clamp=clamp)
        best = next(iter(errors))
        assert errors[best] < 1e-4
        assert best == ("as loaded" if named == stored else f"loaded as {named}, is {stored}")
        assert errors["as loaded"] < 1e-4 if named == stored else errors["as loaded"] > 0.5
    swapped = CheckpointExperts.from_per_expert(gate_proj=w.up, up_proj=w.gate, down_proj=w.down)
    errors = diagnose_gate_up(swapped, expert=1, x=x, y=y, clamp=clamp)
    assert next(iter(errors)) == "gate and up swapped" and errors["as loaded"] > 0.3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"up_proj": torch.zeros(3, 128, 256).bfloat16()}, "same number of experts"),
        ({"up_proj": torch.zeros(4, 120, 256).bfloat16()}, r"up has shape \[120, 256\]"),
        ({"down_proj": torch.zeros(4, 128, 256).bfloat16()}, r"down has shape .*\[256, 128\]"),
        ({"gate_proj": torch.zeros(4, 128, 256)}, r"float32.*\.to\(torch.bfloat16\)"),
        ({"down_proj": torch.zeros(4, 256, 128).to(torch.float8_e4m3fn)}, "down is fp8, .* bf16"),
        ({"up_scale": torch.ones(4, 1, 2)}, "must not have a scale"),
    ],
)
def test_refused_checkpoints(change, message):
    w = random_experts(256, 128)
    given = {"gate_proj": w.gate, "up_proj": w.up, "down_proj": w.down} | change
    with pytest.raises(WeightsError, match=message):
        CheckpointExperts.from_per_expert(**given)


def test_scales_are_required_and_checked():
    q = quantise_e4m3_128x128(torch.ones(256, 256), power_of_two_scales=True)
    given = dict.fromkeys(("gate_proj", "up_proj", "down_proj"), q.values[None])
    with pytest.raises(WeightsError, match="gate has no scale"):
        CheckpointExperts.from_per_expert(**given)
    scales = dict.fromkeys(("gate_scale", "up_scale", "down_scale"), q.scales[None])
    CheckpointExperts.from_per_expert(**given, **scales)
    scales["down_scale"] = torch.ones(1, 256, 2)
    with pytest.raises(WeightsError, match=r"scale of expert 0: down has shape \[256, 2\]"):
        CheckpointExperts.from_per_expert(**given, **scales)
    scales["down_scale"] = torch.ones(1, 2, 2).double()
    with pytest.raises(WeightsError, match="is torch.float64, expected torch.float32"):
        CheckpointExperts.from_per_expert(**given, **scales)


# --- model folders -----------------------------------------------------------------------------


def model_folder(path, tensors: dict[str, torch.Tensor], config: dict, *, parts: int = 1) -> None:
    names = sorted(tensors)
    (path / "config.json").write_text(json.dumps(config))
    if parts == 1:
        save_file(tensors, path / "model.safetensors")
        return
    index = {name: f"model-{i % parts}.safetensors" for i, name in enumerate(names)}
    for file in set(index.values()):
        save_file({n: tensors[n] for n in names if index[n] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def per_expert_tensors(w: SimpleNamespace, prefix: str, names: tuple[str, str, str]) -> dict:
    return {
        f"{prefix}{e}.{name}.weight": matrices[e].clone()
        for name, matrices in zip(names, (w.gate, w.up, w.down), strict=True)
        for e in range(len(matrices))
    }


def assert_same(source: CheckpointExperts, w: SimpleNamespace) -> None:
    for e in range(4):
        expert = source.expert(e)
        for name in ("gate", "up", "down"):
            assert torch.equal(getattr(expert, name), getattr(w, name)[e])


@pytest.mark.parametrize("parts", [1, 3])
@pytest.mark.parametrize(
    ("prefix", "names", "key"),
    [
        ("model.layers.3.mlp.experts.", ("gate_proj", "up_proj", "down_proj"), "num_experts"),
        ("model.layers.3.mlp.experts.", ("gate_proj", "up_proj", "down_proj"), "num_local_experts"),
        ("language_model.layers.3.mlp.experts.", ("gate_proj", "up_proj", "down_proj"), "nested"),
        ("model.layers.3.block_sparse_moe.experts.", ("w1", "w3", "w2"), "n_routed_experts"),
    ],
)
def test_per_expert_folders(tmp_path, prefix, names, key, parts):
    w = random_experts(64, 32)
    tensors = per_expert_tensors(w, prefix, names)
    tensors[prefix.replace("experts.", "gate.weight")] = torch.zeros(4, 64)
    tensors["model.layers.13.mlp.gate_proj.weight"] = torch.zeros(4, 64)
    config = {"text_config": {"num_experts": 4}} if key == "nested" else {key: 4}
    model_folder(tmp_path, tensors, config, parts=parts)
    assert moe_layers(tmp_path) == [3]
    source = CheckpointExperts.from_safetensors(tmp_path, 3)
    assert (source.kind, source.experts, source.hidden, source.intermediate) == ("bf16", 4, 64, 32)
    assert_same(source, w)
    with pytest.raises(WeightsError, match="layer 13 has no experts .* layers with experts: 3"):
        CheckpointExperts.from_safetensors(tmp_path, 13)


@pytest.mark.parametrize("layout", ["halves", "interleaved"])
def test_fused_folders(tmp_path, layout):
    w = random_experts(64, 32)
    prefix = "model.layers.0.mlp.experts."
    tensors = {prefix + "gate_up_proj": fused(w, layout), prefix + "down_proj": w.down}
    model_folder(tmp_path, tensors, {"num_experts": 4})
    assert_same(CheckpointExperts.from_safetensors(tmp_path, 0, layout=layout), w)
    with pytest.raises(WeightsError, match="layout='halves' or layout='interleaved'"):
        CheckpointExperts.from_safetensors(tmp_path, 0)
    model_folder(tmp_path, tensors, {"num_experts": 8})
    with pytest.raises(WeightsError, match="8 experts"):
        CheckpointExperts.from_safetensors(tmp_path, 0, layout=layout)


def test_fp8_folder(tmp_path):
    w = random_experts(256, 128)
    source = quantise_experts(checkpoint(256, 128), "fp8")
    tensors = {}
    for e in range(4):
        for name, (weight, scale) in source.expert(e).projections().items():
            base = f"model.layers.1.mlp.experts.{e}.{name}_proj.weight"
            tensors |= {base: weight, base + "_scale_inv": scale}
    model_folder(tmp_path, tensors, {"n_routed_experts": 4})
    loaded = CheckpointExperts.from_safetensors(tmp_path, 1)
    assert loaded.kind == "fp8"
    for ours, theirs in zip(loaded.dequantise(2), dequantise(source.expert(2)), strict=True):
        assert torch.equal(ours, theirs)
        assert (ours - w.gate[2].float()).abs().max() < 8 if ours.shape == w.gate[2].shape else True
    del tensors["model.layers.1.mlp.experts.3.up_proj.weight_scale_inv"]
    model_folder(tmp_path, tensors, {"n_routed_experts": 4})
    with pytest.raises(WeightsError, match=r"first is .*experts.3.up_proj.weight_scale_inv"):
        CheckpointExperts.from_safetensors(tmp_path, 1)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(WeightsError, match="holds no .safetensors file"):
        CheckpointExperts.from_safetensors(tmp_path, 0)
    w = random_experts(64, 32)
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = per_expert_tensors(w, "model.layers.0.mlp.experts.", names)
    model_folder(tmp_path, tensors, {"hidden_size": 64})
    with pytest.raises(WeightsError, match="none of num_experts, num_local_experts, n_routed"):
        CheckpointExperts.from_safetensors(tmp_path, 0)
    model_folder(tmp_path, tensors, {"num_experts": 5})
    with pytest.raises(WeightsError, match=r"3 tensors are missing, .*experts.4.gate_proj"):
        CheckpointExperts.from_safetensors(tmp_path, 0)


def test_rounding_to_bf16_must_be_asked_for(tmp_path):
    w = random_experts(64, 32)
    names = ("gate_proj", "up_proj", "down_proj")
    tensors = per_expert_tensors(w, "model.layers.0.mlp.experts.", names)
    wide = {name: tensor.float() for name, tensor in tensors.items()}
    model_folder(tmp_path, wide, {"num_experts": 4})
    with pytest.raises(WeightsError, match="float32"):
        CheckpointExperts.from_safetensors(tmp_path, 0)
    assert_same(CheckpointExperts.from_safetensors(tmp_path, 0, round_to_bf16=True), w)
