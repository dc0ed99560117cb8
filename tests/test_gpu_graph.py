"""The public object on one GPU: staging, CUDA graphs, torch.compile, no waiting, one launch.

Why the grid is enough. Staging is compared byte by byte for every format of x, from bf16 and
already quantised, with both widths of ids, on hidden sizes that fill the kernel's chunks and that
do not; its values are those of the CPU test. What is captured, compiled or counted does not depend
on the recipe, so these run with one recipe that has scales and one that has none.
"""

import pytest
import torch
from gpu_helpers import ON_GPU, precompile, random_call, weights_for
from helpers import FORMATS, Layer, bits
from test_staging import FORMS, config_of, inputs_of, wanted

from megamoe import MegaMoEError, MoEConfig
from megamoe.config import MegaMoEInputError, RankInputs
from megamoe.distributed import SymmetricMoE
from megamoe.plan import Plan
from megamoe.ranks.staging import stage
from megamoe.symmetric import SymmetricBuffer

pytestmark = ON_GPU

SHAPE = {"hidden": 512, "intermediate": 256, "experts": 8, "topk": 4, "capacity": 64}
BOTH = [FORMATS[4], FORMATS[0]]
TOKENS = 40
REPLAYS = 200


def make(form):
    return MoEConfig(recipe=form[0], x_scales=form[1], block_m=32, **SHAPE)


@pytest.fixture(scope="module", autouse=True)
def compiled():
    precompile([(make(form), chain, (TOKENS,)) for form in BOTH for chain in (False, True)])


@pytest.fixture(scope="module", params=BOTH, ids=["mxfp4", "bf16"])
def ready(request):
    """(object, weights of two layers): set up once for the whole file."""
    config = make(request.param)
    with SymmetricMoE(config=config) as moe:
        moe.setup()
        moe.setup_chain()
        layers = [Layer(config, seed=s).weights()[0] for s in (1, 2)]
        moved = [
            type(w)(config=config, rank=0, **{n: t.cuda() for n, t in w.tensors.items()})
            for w in layers
        ]
        moe.warmup(moved[0])
        yield moe, moved
        moe.check()


def generator(seed):
    print(f"inputs: seed {seed}")
    return torch.Generator(device="cuda").manual_seed(seed)


def equal(a, b):
    return a.shape == b.shape and torch.equal(bits(a), bits(b))


# --- staging -----------------------------------------------------------------------------------


@pytest.mark.parametrize("form,quantised", FORMS)
def test_staging_writes_the_bytes_of_the_host(form, quantised):
    sizes = [(512, 11, True), (1088, 5, False)]
    if form[1] != "ue8m0_32" and form[0] != "mxfp4":
        sizes.append((1032, 9, True))
    for hidden, tokens, wide in sizes:
        config = config_of(form, hidden)
        inputs = inputs_of(config, tokens, quantised, wide)
        expected = wanted(config, inputs)
        buffer = SymmetricBuffer.allocate(plan=Plan(config, programs=1), device="cuda")
        moved = RankInputs(*(None if t is None else t.cuda() for t in inputs))
        stage(buffer, moved, sms=4)
        for name in ("topk_idx", "topk_weights", "x", "x_scale"):
            got, want = buffer.view(name).cpu(), expected.view(name)
            if got.numel():
                assert torch.equal(got.view(torch.uint8), want.view(torch.uint8)), (name, hidden)
        assert torch.equal(buffer.memory.cpu(), expected.memory)


def test_unaligned_inputs_are_taken(ready):
    moe, (weights, _) = ready
    call = random_call(moe.config, TOKENS, generator(1))
    wanted_y = moe.forward(weights=weights, **call)
    shifted = {}
    for name, tensor in call.items():
        room = torch.empty(tensor.numel() + 1, dtype=tensor.dtype, device="cuda")
        shifted[name] = room[1:].view(tensor.shape).copy_(tensor)
    assert shifted["x"].data_ptr() % 16
    assert equal(moe.forward(weights=weights, **shifted), wanted_y)


# --- calls -------------------------------------------------------------------------------------


def test_fused_equals_chain_for_two_layers(ready):
    moe, layers = ready
    g = generator(2)
    results = []
    for tokens in (TOKENS, 0, 1, 64):
        call = random_call(moe.config, tokens, g)
        for weights in layers:
            moe._fused.buffer.poison()
            results.append(moe.forward(weights=weights, **call))
            assert equal(results[-1], moe.chain(weights=weights, **call)), tokens
    moe.check()
    assert not equal(results[0], results[1]), "the layers have different weights"


def test_quantised_inputs_give_the_same_bits(ready):
    from megamoe import formats

    moe, (weights, _) = ready
    if moe.config.recipe == "bf16":
        pytest.skip("bf16 has no quantised x")
    call = random_call(moe.config, TOKENS, generator(3))
    y = moe.forward(weights=weights, **call)
    x, scale = formats.quantise_x(call.pop("x"), x_scales=moe.config.x_scales)
    assert equal(moe.forward(weights=weights, x=x, x_scale=scale, **call), y)


def test_out_and_inputs_in_place(ready):
    moe, (weights, _) = ready
    call = random_call(moe.config, TOKENS, generator(4))
    y = moe.forward(weights=weights, **call)
    out = torch.full_like(y, float("nan"))
    # the inputs of the call before are still in the buffer
    assert moe.forward(weights=weights, tokens=TOKENS, out=out) is out
    assert equal(out, y)
    views = moe.inputs(TOKENS)
    assert torch.equal(views["topk_idx"], call["topk_idx"].int())
    views["topk_weights"].mul_(2)
    call["topk_weights"] *= 2
    doubled = moe.forward(weights=weights, tokens=TOKENS)
    assert equal(doubled, moe.forward(weights=weights, **call))
    assert not equal(doubled, y)


def test_wrong_arguments_are_refused(ready):
    moe, (weights, _) = ready
    call = random_call(moe.config, TOKENS, generator(5))
    with pytest.raises(MegaMoEInputError, match="out must be"):
        moe.forward(weights=weights, out=torch.empty(1, 2, device="cuda"), **call)
    with pytest.raises(MegaMoEInputError, match="capacity"):
        moe.forward(weights=weights, tokens=65)
    with pytest.raises(MegaMoEInputError, match="is on cpu"):
        moe.forward(weights=weights, **{n: t.cpu() for n, t in call.items()})
    on_cpu = Layer(moe.config).weights()[0]
    with pytest.raises(MegaMoEInputError, match="weights.w1 is on cpu"):
        moe.forward(weights=on_cpu, **call)


def test_a_kernel_that_was_not_compiled_is_refused(ready):
    moe, (weights, _) = ready
    config = make(BOTH[0])
    with SymmetricMoE(config=config) as other:
        other.setup()
        w = weights_for(Layer(config).weights()[0], config)
        call = random_call(config, 3, generator(6))
        with pytest.raises(MegaMoEError, match="no kernel was compiled for 3 tokens"):
            other.forward(weights=w, **call)


# --- no waiting, one launch --------------------------------------------------------------------


def test_nothing_waits_for_the_device(ready):
    moe, (weights, _) = ready
    call = random_call(moe.config, TOKENS, generator(7))
    moe.forward(weights=weights, **call)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            moe.forward(weights=weights, **call)
            moe.chain(weights=weights, **call)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def kernels_of(work):
    """Names of the kernels that `work` launches."""
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        work()
        torch.cuda.synchronize()
    on_gpu = [e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA]
    on_gpu.sort(key=lambda e: e.time_range.start)
    return [e.name for e in on_gpu if not e.name.lower().startswith(("memcpy", "memset"))]


def test_one_launch_a_forward(ready):
    moe, (weights, _) = ready
    call = random_call(moe.config, TOKENS, generator(8))
    out = moe.forward(weights=weights, **call)
    names = kernels_of(lambda: moe.forward(weights=weights, out=out, **call))
    assert len(names) == 2, names
    assert "stage_kernel" in names[0] and "moe_kernel" in names[1]
    names = kernels_of(lambda: moe.forward(weights=weights, tokens=TOKENS, out=out))
    assert len(names) == 1 and "moe_kernel" in names[0], names


# --- graphs and compilation --------------------------------------------------------------------


def test_graph_replays_with_new_routing(ready):
    """Two layers in one graph, replayed on changing inputs, against eager calls."""
    moe, layers = ready
    g = generator(9)
    static = random_call(moe.config, TOKENS, g)
    graph = torch.cuda.CUDAGraph()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for weights in layers:
            moe.forward(weights=weights, **static)
    torch.cuda.current_stream().wait_stream(side)
    with torch.cuda.graph(graph):
        captured = [moe.forward(weights=weights, **static) for weights in layers]
    for n in range(REPLAYS):
        call = random_call(moe.config, TOKENS, g)
        for name, tensor in call.items():
            static[name].copy_(tensor)
        for y in captured:
            y.fill_(float("nan"))
        graph.replay()
        got = [y.clone() for y in captured]
        for weights, y in zip(layers, got, strict=True):
            assert equal(y, moe.forward(weights=weights, **call)), f"replay {n}"
    moe.check()


def test_graph_replays_inputs_in_place(ready):
    moe, (weights, _) = ready
    g = generator(10)
    views = moe.inputs(TOKENS)
    moe.forward(weights=weights, **random_call(moe.config, TOKENS, g))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe.forward(weights=weights, tokens=TOKENS)
    for n in range(10):
        call = random_call(moe.config, TOKENS, g)
        wanted_y = moe.forward(weights=weights, **call)  # leaves its inputs in the buffer
        assert torch.equal(views["topk_idx"], call["topk_idx"].int())
        graph.replay()
        assert equal(y, wanted_y), f"replay {n}"


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_by_torch_without_a_graph_break(ready, backend):
    moe, layers = ready
    g = generator(11)

    def model(x, topk_idx, topk_weights):
        for weights in layers:
            y = moe.forward(weights=weights, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
            x = x + y
        return x

    torch._dynamo.reset()
    compiled_model = torch.compile(model, fullgraph=True, backend=backend, dynamic=False)
    for _ in range(3):
        call = random_call(moe.config, TOKENS, g)
        assert equal(compiled_model(**call), model(**call))
    moe.check()
