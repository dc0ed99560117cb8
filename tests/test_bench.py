"""The benchmark without a GPU: its cases, its arithmetic, its reports, and the whole flow on fakes.

Why this is enough: what a GPU is needed for is the time between two events; everything around it
runs here, with the interpreter in place of the compiled kernel and a clock that is set by hand.
The routings are counted for loads from less than one slot an expert to many, ranks 1 to 8, and
shapes whose top-k does not divide the experts; work and floors against loops over single slots.
"""

import json
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from megamoe import cli_measure
from megamoe.bench import report as bench_report
from megamoe.bench import run as bench
from megamoe.bench import timing as bench_timing
from megamoe.bench.cases import (
    ROUTINGS,
    BenchError,
    Limits,
    choose_experts,
    random_inputs,
    random_weights,
    shape_fields,
    work_of,
)
from megamoe.bench.run import BenchOptions, Row
from megamoe.cli import main
from megamoe.config import RECIPES, MoEConfig, validate_inputs
from megamoe.launch import InterpreterBackend
from megamoe.weights import _allocate

LIMITS = Limits(memory_gbs=4000.0, link_gbs=400.0, fp8_tflops=1200.0, bf16_tflops=600.0)


def config_of(**fields) -> MoEConfig:
    given = {
        "hidden": 256, "intermediate": 256, "experts": 8, "topk": 3, "capacity": 64,
        "recipe": "fp8", "ranks": 2,
    }  # fmt: skip
    return MoEConfig(**(given | fields))


# --- cases ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranks", [1, 2, 4, 8])
@pytest.mark.parametrize(("experts", "topk"), [(16, 6), (24, 5), (8, 8), (8, 1)])
@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_balanced_routing_is_balanced(ranks, experts, topk, tokens):
    config = config_of(ranks=ranks, experts=experts, topk=topk)
    idx = choose_experts(config, tokens=tokens, routing="balanced", seed=ranks + tokens).long()
    assert idx.shape == (ranks, tokens, topk)
    assert all(len(set(token)) == topk for token in idx.flatten(0, 1).tolist())

    def spread(ids: torch.Tensor, bins: int) -> int:
        counts = torch.bincount(ids.flatten(), minlength=bins)
        return int(counts.max() - counts.min())

    assert spread(idx, experts) <= 1
    assert spread(idx // config.experts_per_rank, ranks) <= 1
    for mine in idx:
        assert spread(mine, experts) <= 1
        assert spread(mine // config.experts_per_rank, ranks) <= 1


@pytest.mark.parametrize("routing", ["balanced", "uniform", "zipf", "one-hot"])
def test_routing_follows_the_seed(routing):
    config = config_of(experts=64, topk=6)

    def made(seed: int) -> torch.Tensor:
        return choose_experts(config, tokens=20, routing=routing, seed=seed)

    assert torch.equal(made(1), made(1))
    assert not torch.equal(made(1), made(2))


def test_skewed_routings():
    config = config_of(experts=64, topk=6, ranks=4)
    one = choose_experts(config, tokens=9, routing="one-hot", seed=0)
    assert one.unique().numel() == 1 and one.shape == (4, 9, 6)
    zipf = choose_experts(config, tokens=500, routing="zipf", seed=0)
    assert all(len(set(token)) == 6 for token in zipf.flatten(0, 1).tolist())
    counts = torch.bincount(zipf.flatten(), minlength=64).sort(descending=True).values
    assert counts[0] > 8 * counts[32:].float().mean()
    with pytest.raises(BenchError, match="routing must be one of"):
        choose_experts(config, tokens=1, routing="other", seed=0)


def test_the_command_line_knows_the_same_names():
    # written there again, so that --help need not load torch
    assert cli_measure.ROUTINGS == ROUTINGS
    assert cli_measure.RECIPES == RECIPES


def test_uniform_routing_leaves_experts_out_of_a_small_call():
    config = config_of(experts=64, topk=6, ranks=2)
    uniform = choose_experts(config, tokens=8, routing="uniform", seed=0)
    assert all(len(set(token)) == 6 for token in uniform.flatten(0, 1).tolist())
    # 96 slots, of each token six different ones: 64 * (1 - (1 - 6 / 64) ** 16) = 51 on average
    assert 44 <= uniform.unique().numel() <= 58
    balanced = choose_experts(config, tokens=8, routing="balanced", seed=0)
    assert balanced.unique().numel() == 64
    many = choose_experts(config, tokens=4000, routing="uniform", seed=0)
    counts = torch.bincount(many.flatten(), minlength=64)
    assert counts.min() > 0.8 * counts.float().mean() and counts.max() < 1.2 * counts.float().mean()
    assert choose_experts(config, tokens=0, routing="uniform", seed=0).shape == (2, 0, 6)


def test_shapes():
    assert shape_fields("flash", ranks=2) == {
        "hidden": 4096, "intermediate": 2048, "experts": 64, "topk": 6, "clamp": None,
    }  # fmt: skip
    assert shape_fields("Pro", ranks=1)["experts"] == 48
    assert shape_fields("deepseek-v4-flash", ranks=8)["experts"] == 256
    assert shape_fields("512,256,4,2", ranks=3)["experts"] == 12
    with pytest.raises(BenchError, match="unknown shape"):
        shape_fields("512,256,4", ranks=1)


@pytest.mark.parametrize("recipe", RECIPES)
def test_random_weights_are_like_packed_ones(recipe):
    config = config_of(recipe=recipe, hidden=512, intermediate=192, experts=4, ranks=2)
    weights = random_weights(config, rank=1, seed=3, device="cpu")
    wanted = _allocate(config, 1, "cpu").tensors
    shapes = {name: (t.shape, t.dtype) for name, t in weights.tensors.items()}
    assert shapes == {name: (t.shape, t.dtype) for name, t in wanted.items()}
    for matrix, columns in zip(weights.dequantise(1), (512, 512, 192), strict=True):
        assert bool(torch.isfinite(matrix).all())
        # each product keeps the size of its input, within a factor of two
        assert 0.25 < float(matrix.var()) * columns < 4.0
    padded = weights.w1.view(torch.uint8).view(2, 512, -1)
    assert not bool(padded[:, 384:].any()) and bool(padded[:, 376:384].any())
    other = random_weights(config, rank=0, seed=3, device="cpu")
    assert not torch.equal(other.w1.view(torch.uint8), weights.w1.view(torch.uint8))


@pytest.mark.parametrize("recipe", RECIPES)
def test_random_inputs_fit(recipe):
    config = config_of(recipe=recipe)
    idx = choose_experts(config, tokens=5, routing="balanced", seed=0)[1]
    inputs = random_inputs(config, idx=idx, seed=0, device="cpu")
    given = {name: value for name, value in inputs._asdict().items() if value is not None}
    validate_inputs(config, **given)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_work_against_loops(recipe, ranks):
    config = config_of(recipe=recipe, ranks=ranks, hidden=256, intermediate=128, experts=8, topk=4)
    idx = choose_experts(config, tokens=6, routing="zipf", seed=5)
    idx[torch.rand(idx.shape, generator=torch.Generator().manual_seed(1)) < 0.3] = -1
    local = config.experts_per_rank
    matrix = 3 * 256 * 128
    expert = {"bf16": 2 * matrix, "fp8": matrix + 4 * matrix / 128**2,
              "fp8_block": matrix + 4 * matrix / 128**2,
              "mxfp4": matrix / 2 + matrix / 32}[recipe]  # fmt: skip
    x_row = {"bf16": 512, "fp8": 256 + 8, "fp8_block": 256 + 8, "mxfp4": 256 + 8}[recipe]
    rows, hit = [0] * ranks, [set() for _ in range(ranks)]
    arriving, least = [0] * ranks, [0] * ranks
    for rank in range(ranks):
        for token in idx[rank].tolist():
            others = set()
            for e in token:
                if e < 0:
                    continue
                owner = e // local
                rows[owner] += 1
                hit[owner].add(e)
                if owner != rank:
                    others.add(owner)
                    arriving[owner] += x_row
                    arriving[rank] += 512
            for owner in others:
                least[owner] += x_row
                least[rank] += 512
    work = work_of(config, idx)
    assert work.flops == pytest.approx(2 * matrix * sum(rows) / ranks)
    assert work.busiest_flops == 2 * matrix * max(rows)
    memory = max(len(h) for h in hit) * int(expert) + 6 * (x_row + 512)
    assert work.memory_bytes == pytest.approx(memory, rel=1e-3)
    assert work.link_bytes == max(arriving)
    assert work.least_link_bytes == max(least)
    floors = work.floor_us(LIMITS, recipe=recipe)
    assert floors["memory"] == pytest.approx(work.memory_bytes / 4000e9 * 1e6)
    rate = 600e12 if recipe == "bf16" else 1200e12
    assert floors["matrix"] == pytest.approx(work.busiest_flops / rate * 1e6)
    assert floors["link"] == pytest.approx(work.least_link_bytes / 400e9 * 1e6)


def test_the_known_floors_of_the_flash_shape():
    """Weights of 32 experts at 4300 GB/s take 187 us in fp8 and 99 in mxfp4."""
    limits = replace(LIMITS, memory_gbs=4300.0)
    for recipe, us in (("fp8", 187.0), ("mxfp4", 99.5)):
        config = MoEConfig(**shape_fields("flash", ranks=1), recipe=recipe, capacity=64)
        idx = choose_experts(config, tokens=64, routing="balanced", seed=0)
        assert work_of(config, idx).floor_us(limits, recipe=recipe)["memory"] == pytest.approx(
            us, rel=0.01
        )


# --- options and reports -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tokens": ()}, "tokens is empty"),
        ({"tokens": (0,)}, "tokens must be at least 1"),
        ({"recipes": ("fp4",)}, "recipes can be bf16"),
        ({"routings": ("even",)}, "routings can be balanced"),
        ({"gpus": 0}, "gpus must be at least 1"),
        ({"samples": 1}, "samples must be at least 3"),
        ({"shapes": ("huge",)}, "unknown shape"),
        ({"api": "other"}, "api can be symmetric"),
        ({"api": "local", "gpus": 2}, "local with one GPU"),
    ],
)
def test_options_are_checked(options, says):
    with pytest.raises(BenchError, match=says):
        BenchOptions(**options)


def row(tokens: int, **fields) -> Row:
    given = {
        "shape": "flash", "recipe": "fp8", "routing": "balanced", "tokens": tokens, "ranks": 1,
        "block_m": 16, "fused_us": 200.0, "spread_us": (198.0, 205.0), "warm_us": 190.0,
        "call_us": 230.0, "chain_us": 400.0, "tflops": 12.0, "memory_gbs": 4000.0,
        "link_gbs": 0.0, "floor_us": 187.0, "floor_of": "memory", "floor_fraction": 0.935,
        "times_chain": 2.0, "equal": True,
    }  # fmt: skip
    return Row(**(given | fields))


def stored_report(path: Path, rows: list[Row]) -> Path:
    options = BenchOptions(tokens=(1,), recipes=("fp8",))
    report = bench_report.Report(machine={"gpu": "none"}, options=options)
    for result in (LIMITS, *rows):
        report.add(result)
    path.write_text(json.dumps(report.to_dict()))
    return path


def test_check_finds_what_got_worse(tmp_path):
    path = stored_report(tmp_path / "stored.json", [row(1), row(8), row(64)])
    stored = bench_report.load_rows(path)
    allowed = row(1, floor_fraction=0.935 * 0.921)
    worse = row(8, floor_fraction=0.935 * 0.919)
    failed = Row(shape="flash", recipe="fp8", routing="balanced", tokens=64, ranks=1, block_m=16,
                 error="MegaMoEError: rank 0 did not arrive")  # fmt: skip
    lines = bench_report.regressions([allowed, worse, failed, row(512)], stored)
    assert len(lines) == 2
    assert "8 tokens" in lines[0] and "-8.1 %" in lines[0]
    assert "64 tokens" in lines[1] and "failed" in lines[1]
    with pytest.raises(BenchError, match="none of the cases"):
        bench_report.regressions([row(512)], stored)


def test_check_refuses_other_files(tmp_path):
    for text in ("", "[]", '{"rows": []}', '{"format": "megamoe-bench-0", "rows": []}'):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(BenchError, match="is not a report"):
            bench_report.load_rows(tmp_path / "other.json")


def test_lines_are_aligned_and_failures_visible():
    header, line = bench_report.header_line(), bench_report.row_line(row(64))
    assert len(header) == len(line)
    assert "0.94" in line and "2.00" in line and "187 memory" in line
    assert "differ" in bench_report.row_line(row(64, equal=False))
    failed = Row(shape="flash", recipe="fp8", routing="balanced", tokens=64, ranks=1, block_m=16,
                 error="MegaMoEError: first\nsecond")  # fmt: skip
    assert bench_report.row_line(failed).endswith("FAILED MegaMoEError: first")
    assert failed.failed and row(1, equal=False).failed and not row(1, equal=None).failed


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    rows = [row(1), row(64), row(64, recipe="mxfp4", chain_us=None), row(8, routing="zipf")]
    bench_report.plot(rows, tmp_path / "plot.png", title="none")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(BenchError, match="nothing to plot"):
        bench_report.plot([], tmp_path / "empty.png", title="none")


def test_results_travel_between_processes(tmp_path):
    """A rank appends lines while the parent reads: half a line waits for its end."""
    results = tmp_path / "results"
    lines = [json.dumps(asdict(result)) for result in (LIMITS, row(1), row(8))]
    results.write_text(lines[0] + "\n" + lines[1][:20])
    with results.open() as stream:
        first = list(bench._whole_lines(stream))
        with results.open("a") as writer:
            writer.write(lines[1][20:] + "\n" + lines[2] + "\n")
        rest = list(bench._whole_lines(stream))
    assert len(first) == 1 and len(rest) == 2
    got = [bench._decode(json.loads(line)) for line in first + rest]
    assert got == [LIMITS, row(1), row(8)]


# --- the flow, on fakes --------------------------------------------------------------------------


class FakeClock:
    """Events read a clock that only `spend` moves."""

    def __init__(self) -> None:
        self.ms = 0.0
        self.slept = []

    def event(self, enable_timing: bool) -> SimpleNamespace:
        assert enable_timing
        event = SimpleNamespace(at=None)
        event.record = lambda: setattr(event, "at", self.ms)
        event.elapsed_time = lambda end: end.at - event.at
        return event


@pytest.fixture
def no_gpu(monkeypatch):
    """The benchmark's GPU calls end in the interpreter and a clock set by hand."""
    clock = FakeClock()
    monkeypatch.setattr(torch.cuda, "Event", clock.event)
    monkeypatch.setattr(torch.cuda, "_sleep", clock.slept.append)
    for name in ("synchronize", "empty_cache"):
        monkeypatch.setattr(torch.cuda, name, lambda: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for module in (bench, bench_timing):
        monkeypatch.setattr(module, "DEVICE", "cpu")
    monkeypatch.setattr(bench_timing, "FLUSH_BYTES", 1024)
    monkeypatch.setattr(bench_timing, "UNTIMED", 1)
    monkeypatch.setattr(bench_timing, "default_programs", lambda backend, config: 1)
    monkeypatch.setattr(bench, "why_not_gluon", lambda config: None)
    monkeypatch.setattr(bench, "measure_limits", lambda ranks: LIMITS)
    monkeypatch.setattr(bench, "machine", lambda: {"gpu": "none"})
    costs_ms = {"fused": 0.5, "chain": 1.5}

    class TimedBackend(InterpreterBackend):
        def __init__(self, *, plan, weights, device):
            assert device.type == "cuda"
            super().__init__(plan=plan, weights=weights)

        def run(self, launches, policies, tokens):
            clock.ms += costs_ms["fused" if len(launches) == 1 else "chain"]
            return super().run(launches, policies, tokens)

    monkeypatch.setattr(bench_timing, "GluonBackend", TimedBackend)
    return costs_ms


FLOW = ["bench", "--api", "local", "--shape", "256,256,2,2", "--tokens", "1,3", "--recipes", "fp8",
        "--samples", "3"]  # fmt: skip


def test_the_whole_flow(no_gpu, tmp_path, capsys):
    stored = tmp_path / "bench.json"
    assert main([*FLOW, "--routing", "balanced,one-hot", "--json", str(stored)]) == 0
    said = capsys.readouterr().out
    assert "memory 4000 GB/s" in said and said.count("one-hot") == 2
    report = json.loads(stored.read_text())
    assert report["limits"]["fp8_tflops"] == 1200.0 and report["options"]["seed"] == 0
    assert [r["tokens"] for r in report["rows"]] == [1, 3, 1, 3]
    for found in report["rows"]:
        assert found["equal"] is True and found["error"] is None
        assert found["fused_us"] == found["warm_us"] == found["call_us"] == pytest.approx(500)
        assert found["chain_us"] == pytest.approx(1500)
        assert found["times_chain"] == pytest.approx(3.0)
        flops = 6 * 256 * 256 * found["tokens"] * 2
        assert found["tflops"] == pytest.approx(flops / 500e-6 / 1e12)
        assert found["floor_fraction"] == pytest.approx(found["floor_us"] / 500)
    # as fast as before, then a tenth slower
    assert main([*FLOW, "--check", str(stored)]) == 0
    assert "no loss" in capsys.readouterr().out
    no_gpu["fused"] = 0.55
    assert main([*FLOW, "--check", str(stored)]) == 1
    assert capsys.readouterr().out.count("LOSS") == 2


def test_without_the_chain(no_gpu, capsys):
    assert main([*FLOW, "--no-chain"]) == 0
    assert "FAILED" not in capsys.readouterr().out


def test_different_bits_fail(no_gpu, monkeypatch, capsys):
    chain = bench_timing.LocalEngine.chain
    monkeypatch.setattr(bench_timing.LocalEngine, "chain", lambda self, n: chain(self, n) + 1)
    assert main(FLOW) == 1
    assert capsys.readouterr().out.count("FAILED fused and chain differ") == 2


def test_a_failing_case_is_a_row_and_the_others_go_on(no_gpu, monkeypatch, capsys):
    fused = bench_timing.LocalEngine.fused

    def sometimes(self, tokens):
        if tokens == 1:
            raise RuntimeError("out of registers")
        return fused(self, tokens)

    monkeypatch.setattr(bench_timing.LocalEngine, "fused", sometimes)
    assert main(FLOW) == 1
    said = capsys.readouterr().out
    assert said.count("FAILED RuntimeError: out of registers") == 1
    assert said.count("memory") == 2  # the limits, and the case that ran


def test_the_slowest_rank_counts(no_gpu):
    class Pair(bench_timing.Alone):
        released = 0

        def device_barrier(self):
            self.released += 1

        def slowest(self, times):
            return [max(mine, 700.0) for mine in times]

    ranks = Pair()
    timer = bench_timing.Timer(ranks, samples=4)
    assert timer.measure(lambda i: None) == [700.0] * 4
    assert ranks.released == 4 + bench_timing.UNTIMED


def test_the_public_object_gets_calls_that_it_has(no_gpu, monkeypatch, capsys):
    """SymmetricMoE is replaced by an object that checks each call against its signature."""
    from megamoe import distributed

    y = torch.zeros(1, 256, dtype=torch.bfloat16)
    moe = mock.create_autospec(distributed.SymmetricMoE, instance=True)
    moe.forward.return_value = moe.chain.return_value = y
    made = mock.create_autospec(distributed.SymmetricMoE, return_value=moe)
    monkeypatch.setattr(distributed, "SymmetricMoE", made)
    assert main([*FLOW, "--api", "symmetric"]) == 1  # no time passes on the clock
    assert "ZeroDivisionError" in capsys.readouterr().out
    assert moe.setup.call_count == moe.setup_chain.call_count == 1
    assert moe.warmup.call_args.kwargs == {"tokens": [1, 3]}
    in_place = [c for c in moe.forward.call_args_list if "x" not in c.kwargs]
    assert {c.kwargs["tokens"] for c in in_place} == {1, 3}
    assert any("x_scale" in c.kwargs for c in moe.forward.call_args_list)


@pytest.mark.skipif(torch.cuda.is_available(), reason="has a GPU")
def test_without_a_gpu_it_is_a_plain_error(capsys):
    assert main(["bench"]) == 2
    error = capsys.readouterr().err
    assert "no CUDA device" in error or "Triton is not installed" in error
    assert error.count("\n") == 1


def test_more_gpus_than_there_are(no_gpu, capsys):
    assert main([*FLOW, "--api", "symmetric", "--gpus", "2"]) == 2
    assert "--gpus 2, but 1 GPUs are visible" in capsys.readouterr().err
