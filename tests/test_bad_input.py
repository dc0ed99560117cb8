"""Calls and set-ups that cannot work: refused in plain words, before anything is written.

Why the grid is enough: each check of a call is provoked once on the last of three ranks, after the
inputs of the others were fine, because that is where a check made too late would already have
written. For each, every rank's buffer must keep all its bytes and the next valid call must give the
right bits. tests/test_config.py tries the limits of the checks themselves.
"""

import dataclasses
from pathlib import Path

import pytest
import torch
from helpers import Call, Layer, make_call, make_config, same_bits, wire

from megamoe import MegaMoE, MoEConfig, diagnosis
from megamoe.config import MegaMoEConfigError, MegaMoEInputError, RankInputs
from megamoe.forward import why_not_gluon
from megamoe.launch import InterpreterBackend
from megamoe.plan import Plan
from megamoe.symmetric import MegaMoEError, SymmetricBuffer
from megamoe.weights import CheckpointExperts, WeightsError, pack_weights

TINY = Path(__file__).parents[1] / "examples" / "tiny-moe"
RANKS = 3
LAYER = Layer(make_config(("fp8", "ue8m0_32"), ranks=RANKS, experts=6, topk=2, capacity=4))


def inputs() -> dict[str, list[torch.Tensor]]:
    return make_call(LAYER.config, [4, 1, 3], seed=1, dtype=torch.int64).arguments


@pytest.fixture(scope="module")
def moe():
    """One model for all refused calls, which has run before and so holds a call's leftovers."""
    model = LAYER.model()
    model(**inputs())
    return model


@pytest.fixture(scope="module")
def expected():
    return LAYER.model()(**inputs())


def set_last(given: dict, name: str, value: object) -> dict:
    return given | {name: [*given[name][:-1], value]}


def with_id(bad: int):
    def change(given: dict) -> dict:
        idx = given["topk_idx"][-1].clone()
        idx[1, 1] = bad
        return set_last(given, "topk_idx", idx)

    return change


def too_many(given: dict) -> dict:
    more = make_call(LAYER.config, 5, seed=2)
    return {name: [*v[:-1], more.arguments[name][0]] for name, v in given.items()}


def last(name: str, change) -> object:
    return lambda given: set_last(given, name, change(given[name][-1]))


def quantised(given: dict) -> dict:
    values, scales = zip(*(wire(LAYER.config, x) for x in given["x"]), strict=True)
    return given | {"x": list(values), "x_scale": list(scales)}


def without_scale(given: dict) -> dict:
    return given | {"x": quantised(given)["x"]}


def superfluous_scale(given: dict) -> dict:
    return given | {"x_scale": quantised(given)["x_scale"]}


def last_scale(change) -> object:
    return lambda given: last("x_scale", change)(quantised(given))


def every_second_row(x: torch.Tensor) -> torch.Tensor:
    return x.repeat_interleave(2, dim=0)[::2]


REFUSED = {
    "capacity": (too_many, r"rank 2: 5 tokens > capacity 4"),
    "expert id E": (with_id(6), r"rank 2: topk_idx\[1, 1\] is 6: .* between 0 and 5, or -1"),
    "expert id -2": (with_id(-2), r"rank 2: topk_idx\[1, 1\] is -2"),
    "expert id 2^40": (with_id(2**40), r"rank 2: topk_idx\[1, 1\] is 1099511627776"),
    "expert id 2^32": (with_id(2**32), r"rank 2: topk_idx\[1, 1\] is 4294967296"),
    "x float32": (last("x", torch.Tensor.float), r"rank 2: x .*bfloat16 or .*, got float32"),
    "ids int16": (last("topk_idx", torch.Tensor.short), r"topk_idx must be .*, got int16"),
    "ids float": (last("topk_idx", torch.Tensor.float), r"topk_idx must be .*, got float32"),
    "weights int": (last("topk_weights", torch.Tensor.int), r"topk_weights must be .*got int32"),
    "weights float64": (last("topk_weights", torch.Tensor.double), r"topk_weights .*got float64"),
    "x transposed": (last("x", lambda x: x.T.contiguous().T), r"x must be contiguous.*strides"),
    "x every second row": (last("x", every_second_row), r"x must be contiguous.*strides"),
    "ids transposed": (last("topk_idx", lambda i: i.T.contiguous().T), r"topk_idx must be contig"),
    "x of one row": (last("x", lambda x: x[0]), r"x must have shape \[tokens, 256\], got \[256\]"),
    "x narrow": (last("x", lambda x: x[:, :128].contiguous()), r"x must have shape .*\[3, 128\]"),
    "fewer ids": (last("topk_idx", lambda i: i[:2]), r"topk_idx must have .*\[3, 2\].*\[2, 2\]"),
    "one slot": (last("topk_weights", lambda w: w[:, :1].contiguous()), r"topk_weights must have"),
    "x is a list": (last("x", torch.Tensor.tolist), r"x must be a torch.Tensor, got list"),
    "no x_scale": (without_scale, r"rank 0: a float8_e4m3fn x needs x_scale \(ue8m0_32\)"),
    "x_scale with bf16 x": (superfluous_scale, r"x_scale is only allowed with a float8_e4m3fn x"),
    "x_scale float32": (last_scale(torch.Tensor.float), r"rank 2: x_scale .* must be int32"),
    "x_scale of a row less": (last_scale(lambda s: s[:2]), r"have shape \[3, 2\], got \[2, 2\]"),
    "x_scale strided": (last_scale(every_second_row), r"x_scale must be contiguous"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_refused_and_nothing_written(name, moe, expected):
    change, message = REFUSED[name]
    before = [buffer.memory.clone() for buffer in moe._fused.buffers]
    for call in (moe, moe.chain):
        with pytest.raises(MegaMoEInputError, match=message):
            call(**change(inputs()))
    after = [buffer.memory for buffer in moe._fused.buffers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert same_bits(moe(**inputs()), expected)


@pytest.mark.parametrize("name", ["x", "topk_idx", "topk_weights"])
@pytest.mark.parametrize("count", [0, 2, 4])
def test_tensors_of_the_wrong_number_of_ranks(name, count, moe, expected):
    given = inputs()
    given[name] = (given[name] * 2)[:count]
    before = [buffer.memory.clone() for buffer in moe._fused.buffers]
    with pytest.raises(ValueError, match=f"{name}: one tensor for each of 3 ranks, got {count}"):
        moe(**given)
    with pytest.raises(ValueError, match="x: one tensor for each of 3 ranks, got 1"):
        moe(**inputs() | {"x": inputs()["x"][0]})
    after = [buffer.memory for buffer in moe._fused.buffers]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert same_bits(moe(**inputs()), expected)


# --- a rank that does not arrive ---------------------------------------------------------------


@pytest.mark.parametrize("missing", range(RANKS))
def test_missing_rank_is_named_and_nobody_hangs(missing, monkeypatch):
    """The others' waits expire, the launch ends, and the buffer stays out of use."""
    plan = Plan(LAYER.config, programs=2)
    backend = InterpreterBackend(plan=plan, weights=LAYER.weights(), expire_deadlines=True)
    model = LAYER.model()
    model._fused = backend
    enqueue = backend.machine.enqueue

    def without_missing(rank: int, *args, **kwargs) -> None:
        if rank != missing:
            enqueue(rank, *args, **kwargs)

    monkeypatch.setattr(backend.machine, "enqueue", without_missing)
    # who has given up adds partials that nobody wrote and throws them away: let them be zeros
    monkeypatch.setattr(backend, "_poison", lambda *args: None)
    with pytest.raises(MegaMoEError, match=rf"waited 60 s .*rank {missing} did not arrive"):
        model(**make_call(LAYER.config, 1, seed=3).arguments)
    for rank in set(range(RANKS)) - {missing}:
        with pytest.raises(MegaMoEError, match=f"rank {rank}, call 1: .*rank {missing} did not"):
            diagnosis.check(backend.buffers[rank], rank=rank)
    diagnosis.check(backend.buffers[missing], rank=missing)


# --- set-up ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"experts": 8, "ranks": 3}, "8 experts cannot be divided evenly over 3 ranks"),
        ({"experts": 146, "ranks": 73}, "ranks must be at most 72, got 73"),
        ({"recipe": "fp8", "x_scales": None, "hidden": 264}, "hidden must be .* of 32 .*got 264"),
        ({"recipe": "mxfp4", "x_scales": None, "hidden": 100}, "hidden must be .* of 32 .*got 100"),
        ({"recipe": "bf16", "x_scales": None, "hidden": 260}, "hidden must be .* of 8, got 260"),
        ({"intermediate": 100}, "intermediate must be a multiple of 8, got 100"),
        ({"recipe": "int4", "x_scales": None}, "recipe must be one of bf16, .*got 'int4'"),
        ({"recipe": "bf16", "x_scales": "token"}, "'token' does not go with recipe 'bf16'"),
    ],
)  # fmt: skip
def test_refused_configurations(options, message):
    with pytest.raises(MegaMoEConfigError, match=message):
        make_config(**options)


def test_unknown_backend():
    message = "backend must be one of auto, gluon, interpreter, got 'cuda'"
    with pytest.raises(ValueError, match=message):
        LAYER.model(backend="cuda")


@pytest.mark.skipif(why_not_gluon(LAYER.config) is None, reason="this machine has the GPU")
def test_gluon_without_a_gpu():
    with pytest.raises(RuntimeError, match="'gluon' cannot run here: .*'interpreter' can"):
        LAYER.model(backend="gluon")
    assert LAYER.model(backend="auto").backend == "interpreter"


@pytest.mark.parametrize("programs", [0, -1])
def test_programs_must_be_positive(programs):
    with pytest.raises(ValueError, match=f"programs must be at least 1, got {programs}"):
        LAYER.model(programs=programs)


def test_weights_of_other_ranks_or_configurations():
    weights = LAYER.weights()
    build = {"config": LAYER.config, "backend": "interpreter"}
    with pytest.raises(ValueError, match="the weights of all 3 ranks are needed, got 2"):
        MegaMoE(weights=weights[:2], **build)
    with pytest.raises(ValueError, match=r"weights\[0\] was packed for rank 1"):
        MegaMoE(weights=[weights[1], weights[0], weights[2]], **build)
    other = dataclasses.replace(LAYER.config, clamp=1.0)
    with pytest.raises(ValueError, match=r"weights\[0\] was packed for"):
        MegaMoE(weights=weights, config=other, backend="interpreter")


def test_checkpoint_of_another_kind_or_shape():
    checkpoint = CheckpointExperts.from_safetensors(TINY, layer=0)
    fits = {"hidden": 256, "intermediate": 128, "experts": 16, "topk": 4, "capacity": 4}
    with pytest.raises(WeightsError, match="recipe fp8 needs experts of kind .*got bf16"):
        pack_weights(MoEConfig(recipe="fp8", **fits), checkpoint, 0)
    with pytest.raises(WeightsError, match="experts 16, the configuration 8"):
        pack_weights(MoEConfig(recipe="bf16", **(fits | {"experts": 8})), checkpoint, 0)
    with pytest.raises(WeightsError, match="rank 1 is not within 0..0"):
        pack_weights(MoEConfig(recipe="bf16", **fits), checkpoint, 1)


def test_a_call_object_is_complete():
    """The helper passes every input: a refused call above is refused for the reason it names."""
    assert set(inputs()) == {f.name for f in dataclasses.fields(Call)}


def test_an_id_out_of_range_that_reaches_the_kernel_harms_only_its_token():
    """On a GPU nobody reads the ids before the launch: the kernel skips the slot, reports it, and
    the token becomes NaN; every other row has its bits.
    """
    moe = LAYER.model()
    given = inputs()
    good = [y.clone() for y in moe(**given)]
    write, last = SymmetricBuffer.write_inputs, moe._fused.buffers[-1]

    def spoilt(buffer: SymmetricBuffer, rank_inputs: RankInputs) -> None:
        write(buffer, rank_inputs)
        if buffer is last:
            buffer.view("topk_idx")[1, 0] = LAYER.config.experts

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SymmetricBuffer, "write_inputs", spoilt)
        patch.setattr(moe, "check", lambda: None)
        y = moe(**given)
    with pytest.raises(MegaMoEError, match="rank 2.*slot 2 of topk_idx holds expert 6"):
        moe.check()
    assert all(torch.equal(*pair) for pair in zip(y[:-1], good[:-1], strict=True))
    assert y[-1][1].isnan().all()
    assert torch.equal(y[-1][[0, 2]], good[-1][[0, 2]])
