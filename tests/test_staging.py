"""The staging kernel on the interpreter: the bytes that it puts into the buffer.

Why the grid is enough. The kernel's paths are chosen by the format of x and by whether x comes
quantised, and each is tried with both widths of ids. Hidden sizes: whole chunks of 512 columns
(512), a chunk and a part (768), and a part of a scale block (320 is 2.5 blocks of 128, 1032 leaves
8 columns); tokens: none, part of a tile of four rows, a tile and a part. Values: all magnitudes
that bf16 has, zeros, subnormals, NaN and Inf, and the two sides of every rounding of the scale.
The oracle is :mod:`megamoe.formats` with the copies of :class:`SymmetricBuffer`. Compiled for
sm_90a, every variant is read for what the interpreter cannot see: inexact division, fused
multiplications, scalar accesses, spills.
"""

import pytest
import torch
from helpers import FORMATS

from megamoe import formats
from megamoe.config import MoEConfig, validate_inputs
from megamoe.interpreter import Machine
from megamoe.kernel import compat
from megamoe.kernel.stage import stage_kernel
from megamoe.plan import Plan
from megamoe.ranks.staging import OPTIONS, spec_of, stage_on_interpreter, stage_specs
from megamoe.symmetric import SymmetricBuffer

SEED = 5


def config_of(form, hidden):
    return MoEConfig(
        hidden=hidden, intermediate=64, experts=8, topk=3, capacity=11, recipe=form[0],
        x_scales=form[1],
    )  # fmt: skip


def values(tokens, hidden):
    """Rows over the whole range of bf16, with blocks of zeros, subnormals, NaN and Inf."""
    g = torch.Generator().manual_seed(SEED)
    x = torch.randn(tokens, hidden, generator=g)
    blocks = torch.randint(-120, 120, (tokens, -(-hidden // 32)), generator=g)
    x = x * (2.0 ** blocks.float()).repeat_interleave(32, dim=1)[:, :hidden]
    x = x.bfloat16()
    if tokens:
        x[0, :64] = 0.0
        x[0, 64] = float("nan")
        x[0, 100] = float("-inf")
        x[0, 128:160] = 2.0**-133
        # the amax on both sides of 1.75 * 2^n, where the exponent steps
        x[-1] = 0.0
        x[-1, 0:256:32] = torch.tensor([1.75, 1.7578125, 1.7421875, 1.0, 2.0, 448.0, 450.0, 1e30])
    if tokens > 5:
        x[5] = 0.0
        x[4] = float("inf")
    return x


def inputs_of(config, tokens, quantised, wide):
    g = torch.Generator().manual_seed(SEED + 1)
    x, scale = values(tokens, config.hidden), None
    if quantised:
        x, scale = formats.quantise_x(x, x_scales=config.x_scales)
    idx = torch.randint(-1, config.experts, (tokens, config.topk), generator=g)
    weights = torch.rand(tokens, config.topk, generator=g)
    return validate_inputs(
        config, x=x, x_scale=scale, topk_idx=idx if wide else idx.int(), topk_weights=weights
    )


def staged(config, inputs, *, grid=2):
    buffer = SymmetricBuffer.allocate(plan=Plan(config, programs=1))
    stage_on_interpreter(Machine(ranks=1), buffer, inputs, grid=grid)
    return buffer


def wanted(config, inputs):
    buffer = SymmetricBuffer.allocate(plan=Plan(config, programs=1))
    if inputs.x_scale is None and config.recipe != "bf16":
        x, scale = formats.quantise_x(inputs.x, x_scales=config.x_scales)
        inputs = inputs._replace(x=x, x_scale=scale)
    buffer.write_inputs(inputs)
    return buffer


FORMS = [(form, quantised) for form in FORMATS for quantised in (False, True)
         if not (quantised and form[0] == "bf16")]  # fmt: skip


@pytest.mark.parametrize("form,quantised", FORMS)
@pytest.mark.parametrize("hidden,tokens,wide", [
    (320, 5, True), (512, 4, False), (768, 11, True), (1056, 3, False), (1032, 9, True),
])  # fmt: skip
def test_same_bytes_as_the_host(form, quantised, hidden, tokens, wide):
    if hidden % 32 and (form[1] == "ue8m0_32" or form[0] == "mxfp4"):
        hidden = 1088
    config = config_of(form, hidden)
    inputs = inputs_of(config, tokens, quantised, wide)
    got, want = staged(config, inputs), wanted(config, inputs)
    for name in ("topk_idx", "topk_weights", "x", "x_scale"):
        region = got.plan.region[name]
        part = slice(region.offset, region.offset + region.nbytes)
        assert torch.equal(got.memory[part], want.memory[part]), name
    assert torch.equal(got.memory, want.memory)
    assert got.view("x")[:tokens].view(torch.uint8).any()


@pytest.mark.parametrize("grid", [1, 5])
def test_any_number_of_programs(grid):
    config = config_of(("mxfp4", "ue8m0_32"), 1056)
    inputs = inputs_of(config, 11, False, True)
    assert torch.equal(staged(config, inputs, grid=grid).memory, wanted(config, inputs).memory)


def test_no_tokens_write_nothing():
    config = config_of(("fp8", "ue8m0_32"), 320)
    assert not staged(config, inputs_of(config, 0, False, True)).memory.any()


def test_rows_beyond_the_call_are_left_alone():
    config = config_of(("fp8_block", "block128"), 320)
    buffer = SymmetricBuffer.allocate(plan=Plan(config, programs=1))
    buffer.memory.fill_(7)
    stage_on_interpreter(Machine(ranks=1), buffer, inputs_of(config, 5, False, False))
    assert (buffer.view("x")[5:].view(torch.uint8) == 7).all()
    assert (buffer.view("x")[:, 320:].view(torch.uint8) == 7).all()
    assert (buffer.view("topk_idx")[5:] == 0x07070707).all()
    assert (buffer.view("x_scale")[5:].view(torch.uint8) == 7).all()


@pytest.mark.parametrize("bad", [2**32 + 3, -(2**40), 2**31])
def test_a_wide_id_does_not_wrap_into_a_valid_one(bad):
    config = config_of(("bf16", "none"), 320)
    inputs = inputs_of(config, 2, False, True)
    inputs.topk_idx[1, 1] = bad
    id_ = int(staged(config, inputs).view("topk_idx")[1, 1])
    assert not -1 <= id_ < config.experts
    assert (id_ < 0) == (bad < 0)


def test_every_kernel_is_listed_for_compilation():
    for form in FORMATS:
        config = config_of(form, 320)
        plan = Plan(config, programs=1)
        needed = {
            spec_of(plan, inputs_of(config, 2, quantised, wide))
            for quantised in (False, True)
            if not (quantised and form[0] == "bf16")
            for wide in (False, True)
        }
        assert needed == set(stage_specs(plan))


@pytest.mark.skipif(compat.TRITON_VERSION is None, reason="Triton is missing or hidden")
@pytest.mark.parametrize("form", [f for f in FORMATS if f[0] != "mxfp4"])
def test_compiled_code(form, tmp_path, monkeypatch):
    import triton
    from triton.backends.compiler import GPUTarget

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for spec in stage_specs(Plan(config_of(form, 4096), programs=1)):
        types = {
            "buffer": "*i8",
            "x": "*bf16" if not spec.quantised or spec.x_bytes == 2 else "*u8",
            "x_scale": "*i32" if spec.x_scales == "ue8m0_32" else "*fp32",
            "topk_idx": "*i64" if spec.wide_ids else "*i32",
            "topk_weights": "*fp32",
            "tokens": "i32",
            "spec": "constexpr",
        }
        source = compat.ast_source(
            stage_kernel, types, {"spec": spec}, {(0,): [["tt.divisibility", 16]]}
        )
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=dict(OPTIONS))
        ptx = compiled.asm["ptx"]
        assert "div.full" not in ptx and "div.approx" not in ptx
        assert "fma" not in ptx
        assert ("div.rn" in ptx) == (spec.x_scales == "block128" and not spec.quantised)
        assert ".local" not in ptx
        # at least 8 bytes at once, in and out
        wide = [line for line in ptx.splitlines() if ".v2.b32" in line or ".v4.b32" in line]
        assert any("ld.global" in line for line in wide), spec
        assert any("st.global" in line for line in wide), spec
