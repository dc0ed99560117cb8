"""The command line, in process: what it prints, its JSON and its exit status.

Why this grid is enough: the doctor's judgement is a pure function of facts, so every kind of
machine (no GPU, each GPU generation, several GPUs with and without a path between them, each
missing or old package) is one made-up set of facts. `plan` is arithmetic on numbers that other
tests cover; here its edges are tried: 72 ranks, sizes past 2^31, bad requests. `run` is tried once
a source (shape, model, captured inputs) and once a routing on tiny shapes; that the kernel itself
is right in every recipe is the business of its own tests. Each check of a trial is made to fail.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megamoe import cli, doctor, trial
from megamoe.charts import LEVELS, MOST_BARS, NONE, bars, sparkline
from megamoe.config import RECIPES, MoEConfig
from megamoe.progress import Progress

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "tiny-moe"
INPUTS = MODEL / "layer_inputs.safetensors"
KEYS = {
    "backend",
    "ranks",
    "recipe",
    "shape",
    "launches",
    "bit_equal_to_chain",
    "relative_error",
    "cosine",
    "tokens_per_expert",
    "seconds",
}
OK = doctor.Module(version="9.9.9")
MISSING = doctor.Module(problem="not installed")
LAPTOP = doctor.Facts(
    python=(3, 10, 0),
    system="Linux x86_64",
    cores=2,
    torch=doctor.Module(version="2.9.0+cpu"),
    triton=MISSING,
    numpy=OK,
    greenlet=OK,
    safetensors=OK,
)


def gpu(index: int = 0, capability: tuple[int, int] = (9, 0)) -> doctor.Gpu:
    return doctor.Gpu(index=index, name="a GPU", capability=capability, memory_gib=80.0)


HOPPER = replace(
    LAPTOP,
    triton=doctor.Module(version="3.6.0"),
    torch=doctor.Module(version="2.11.0+cu130"),
    torch_cuda="13.0",
    driver="580.65.06",
    gpu_seen=True,
    gpus=(gpu(),),
)


def run(capsys: pytest.CaptureFixture, *arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of one command."""
    capsys.readouterr()
    status = cli.main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


# doctor


def test_laptop_runs_the_interpreter_and_says_why_not_the_gpu():
    report = doctor.judge(LAPTOP)
    assert report.can_run == ["interpreter", "reference"]
    assert report.backends["gluon"].why == "no NVIDIA GPU was found"
    assert report.backends["interpreter"].ranks is None
    assert report.verdict[-1].startswith("You can run: interpreter")


def test_hopper_runs_everything():
    report = doctor.judge(HOPPER)
    assert report.can_run == list(doctor.BACKENDS)
    assert all(check.state == "ok" for check in report.checks)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"triton": MISSING}, "Triton is not installed"),
        ({"triton": doctor.Module(version="3.5.1")}, "Triton 3.5.1 is older than 3.6"),
        ({"triton": doctor.Module(), "triton_hidden": True}, "Triton is hidden by"),
        ({"torch": MISSING}, "torch is not installed"),
        ({"torch": doctor.Module(version="2.8.1")}, "torch 2.8.1 is older than 2.9"),
        ({"python": (3, 9, 1)}, "Python 3.9.1 is older than 3.10"),
        ({"gpus": (), "torch_cuda": None}, "is a CPU build and cannot use the NVIDIA GPU"),
        ({"gpus": (gpu(capability=(8, 9)),)}, "compute capability 8.9, and the kernel needs 9.0"),
    ],
)
def test_what_keeps_the_compiled_kernel_from_running(changes, why):
    report = doctor.judge(replace(HOPPER, **changes))
    assert "gluon" not in report.can_run
    assert why in report.backends["gluon"].why
    assert any(why in line for line in report.verdict)


def test_triton_3_10_is_newer_than_3_6():
    facts = replace(HOPPER, triton=doctor.Module(version="3.10.0"))
    assert "gluon" in doctor.judge(facts).can_run


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0), (7, 5), (13, 0)])
def test_other_generations_are_told_what_works(capability):
    report = doctor.judge(replace(HOPPER, gpus=(gpu(capability=capability),)))
    (check,) = [check for check in report.checks if check.name == "GPU 0"]
    assert check.state == "note"
    assert "9.0" in check.say and "interpreter" in check.say
    reason = doctor.OTHER_GENERATIONS.get(capability[0])
    assert reason is None or reason in check.say
    assert report.can_run == ["interpreter", "reference"]


def test_a_missing_path_between_gpus_is_noted():
    four = replace(HOPPER, gpus=tuple(gpu(i) for i in range(4)))
    states = {check.name: check for check in doctor.judge(four).checks}
    assert states["peer access"].state == "ok" and "GPU 3" in states
    severed = doctor.judge(replace(four, no_peer_access=((0, 3), (3, 0))))
    (check,) = [check for check in severed.checks if check.name == "peer access"]
    assert check.state == "note" and "0->3, 3->0" in check.found


@pytest.mark.parametrize("name", ["numpy", "greenlet"])
def test_interpreter_needs_its_packages(name):
    report = doctor.judge(replace(LAPTOP, **{name: MISSING}))
    assert report.can_run == ["reference"]
    assert name in report.backends["interpreter"].why
    assert any(check.say == f"pip install {name}" for check in report.checks)


def test_nothing_runs_without_torch():
    report = doctor.judge(replace(LAPTOP, torch=MISSING))
    assert report.can_run == []
    assert "nothing yet" in report.verdict[-1]
    with pytest.raises(doctor.BackendError, match="torch is not installed"):
        doctor.choose_backend("auto", report=report, ranks=1)


def test_auto_takes_the_fastest_and_says_why_not_a_faster_one():
    hopper, laptop = doctor.judge(HOPPER), doctor.judge(LAPTOP)
    assert doctor.choose_backend("auto", report=hopper, ranks=1)[0] == "gluon"
    backend, why = doctor.choose_backend("auto", report=laptop, ranks=2)
    assert backend == "interpreter" and "no NVIDIA GPU" in why
    backend, why = doctor.choose_backend("auto", report=hopper, ranks=2)
    assert backend == "interpreter" and "in one process it runs 1" in why


def test_an_explicit_backend_is_never_replaced():
    laptop = doctor.judge(LAPTOP)
    assert doctor.choose_backend("reference", report=laptop, ranks=2) == ("reference", "asked for")
    with pytest.raises(doctor.BackendError, match="no NVIDIA GPU.*interpreter or reference"):
        doctor.choose_backend("gluon", report=laptop, ranks=1)
    with pytest.raises(doctor.BackendError, match="unknown backend 'cuda'"):
        doctor.choose_backend("cuda", report=laptop, ranks=1)


def test_doctor_on_this_machine(capsys):
    status, out, _ = run(capsys, "doctor")
    assert status == 0
    assert torch.__version__ in out
    assert out.rstrip().splitlines()[-1].startswith("You can run: ")
    status, out, _ = run(capsys, "doctor", "--json")
    answer = json.loads(out)
    assert status == 0 and "interpreter" in answer["can_run"]
    assert set(answer["backends"]) == set(doctor.BACKENDS)
    status, short, _ = run(capsys, "doctor", "--short")
    assert short.splitlines() == answer["verdict"]


def test_hidden_triton_is_reported(capsys, monkeypatch):
    monkeypatch.setenv(doctor.HIDE_TRITON, "1")
    status, out, _ = run(capsys, "doctor")
    assert status == 0 and f"{doctor.HIDE_TRITON} is set: interpreter only" in out


def test_doctor_answers_where_torch_cannot_be_imported(tmp_path):
    (tmp_path / "torch.py").write_text("raise ImportError('libcudart.so.13: not found')\n")
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT / 'src'}"}
    command = [sys.executable, "-m", "megamoe.cli", "doctor"]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert answer.returncode == 1, answer.stderr
    assert "libcudart.so.13: not found" in answer.stdout
    assert "nothing yet" in answer.stdout


# plan


def test_recipes_on_the_command_line_are_all_there_are():
    assert cli.RECIPES == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
def test_plan_lists_regions_without_overlap_that_fill_the_buffer(capsys, recipe):
    status, out, _ = run(
        capsys, "plan", "deepseek-v4-flash", "--ranks", 8, "--recipe", recipe, "--json"
    )
    answer = json.loads(out)
    assert status == 0
    end = 0
    for region in answer["regions"]:
        assert region["offset"] >= end and region["writer"] and region["reader"]
        end = region["offset"] + region["nbytes"]
    assert end <= answer["nbytes"] < end + 4096
    assert answer["config"]["experts"] == 256 and answer["config"]["clamp"] == 10.0


def test_plan_text_says_sizes_and_tiles(capsys):
    status, out, _ = run(capsys, "plan", "DeepSeek-V4-Pro", "--ranks", 8, "--capacity", 1024)
    _, answer, _ = run(
        capsys, "plan", "DeepSeek-V4-Pro", "--ranks", 8, "--capacity", 1024, "--json"
    )
    answer = json.loads(answer)
    assert status == 0
    assert f"({answer['nbytes']} bytes)" in out and "MiB" in out
    assert [tiles["tokens"] for tiles in answer["tiles"]][-1] == 1024
    for region in answer["regions"]:
        assert (region["name"] in out) or region["nbytes"] == 0


@pytest.mark.parametrize("capacity,mib", [(4096, None), (8192, "768.0")])
def test_plan_says_what_unpacked_weights_take(capsys, capacity, mib):
    """A byte a weight of 32 experts, where a call can be long enough."""
    arguments = ("plan", "DeepSeek-V4-Flash", "--ranks", 8, "--recipe", "mxfp4")
    _, out, _ = run(capsys, *arguments, "--capacity", capacity)
    assert ("unpacked" in out) == (mib is not None)
    assert mib is None or f"unpacked      {mib} MiB per rank (805306368 bytes) beside it" in out
    _, out, _ = run(capsys, *arguments, "--capacity", capacity, "--json")
    assert json.loads(out)["unpacked_nbytes"] == (32 * 3 * 4096 * 2048 if mib else 0)


def test_plan_past_two_gibibytes_and_72_ranks(capsys):
    shape = "1000000,7168,3072,432,8"
    status, out, _ = run(capsys, "plan", "--shape", shape, "--ranks", 72, "--json")
    answer = json.loads(out)
    assert status == 0
    partials = next(region for region in answer["regions"] if region["name"] == "partials")
    assert partials["nbytes"] == 1_000_000 * 8 * 7168 * 2
    assert answer["nbytes"] > 2**31 and answer["config"]["capacity"] == 1_000_000


def test_plan_for_one_load(capsys):
    _, out, _ = run(capsys, "plan", "Qwen3-30B-A3B", "--tokens", 128, "--ranks", 4, "--json")
    (tiles,) = json.loads(out)["tiles"]
    assert tiles["tokens_per_expert"] == 128 * 4 * 8 / 128
    assert tiles["ring_rows"] == tiles["ring_blocks"] * tiles["block_m"]


@pytest.mark.parametrize(
    ("arguments", "say"),
    [
        (["nonesuch"], "unknown model 'nonesuch'"),
        ([], "give either a model"),
        (["Kimi-K2", "--shape", "8,256,256,8,2"], "give either a model"),
        (["Kimi-K2", "--ranks", "7"], "384 experts cannot be divided evenly over 7 ranks"),
        (["Kimi-K2", "--x-scales", "block128"], "does not go with recipe 'mxfp4'"),
        (["Kimi-K2", "--tokens", "8193"], "between 1 and the capacity 8192"),
        (["Kimi-K2", "--tokens", "0"], "between 1 and the capacity 8192"),
    ],
)
def test_plan_refuses_in_plain_words(capsys, arguments, say):
    status, out, err = run(capsys, "plan", *arguments)
    assert status == 2 and out == ""
    assert err.startswith("megamoe: error: ") and say in err


@pytest.mark.parametrize(
    ("shape", "say"),
    [("8,256,256,8", "has 4 numbers; give 5: tokens,"), ("8,256,x,8,2", "are integers")],
)
def test_a_malformed_shape_is_explained(capsys, shape, say):
    with pytest.raises(SystemExit) as stop:
        cli.main(["plan", "--shape", shape])
    assert stop.value.code == 2 and say in capsys.readouterr().err


# run: without the kernel


def test_reference_agrees_with_the_captured_output_of_every_layer(capsys, tmp_path):
    file = tmp_path / "result.json"
    status, out, _ = run(
        capsys, "run", "--model", MODEL, "--inputs", INPUTS, "--recipe", "bf16",
        "--backend", "reference", "--json", file,
    )  # fmt: skip
    answer = json.loads(file.read_text())
    assert status == 0 and "4 checks passed" in out
    assert set(answer) == KEYS | {"layers"}
    assert [layer["layer"] for layer in answer["layers"]] == [0, 1, 2, 3]
    assert answer["relative_error"] == max(layer["relative_error"] for layer in answer["layers"])
    assert sum(answer["tokens_per_expert"]) == 4 * 512 * 4
    assert answer["layers"][1]["tokens_per_expert"][5] == 0


def test_captured_output_of_another_layer_fails(capsys, monkeypatch):
    read = trial.captured_inputs

    def crossed(path, *, layer, ranks, tokens):
        inputs = read(path, layer=layer, ranks=ranks, tokens=tokens)
        other = read(path, layer=layer + 1, ranks=ranks, tokens=tokens)
        return replace(inputs, expected=other.expected)

    monkeypatch.setattr(trial, "captured_inputs", crossed)
    status, out, _ = run(
        capsys, "run", "--model", MODEL, "--inputs", INPUTS, "--recipe", "bf16",
        "--backend", "reference", "--layer", 0,
    )  # fmt: skip
    assert status == 1
    assert "FAIL  captured output" in out and "1 of 1 checks FAILED" in out


@pytest.mark.parametrize(
    ("arguments", "say"),
    [
        (["--shape", "8,256,256,8,2", "--inputs", "x.safetensors"], "--inputs goes with --model"),
        (["--shape", "8,256,256,8,2", "--layer", "0"], "--layer goes with --model"),
        (["--shape", "8,256,256,8,2", "--tokens", "9"], "9 tokens are more than the 8 per rank"),
        (["--shape", "8,256,256,8,2", "--tokens", "-1"], "must not be negative"),
        (["--shape", "8,256,250,8,2"], "intermediate must be a multiple of 8"),
        (["--model", str(MODEL), "--layer", "4"], "layer 4 is not there; layers: 0, 1, 2, 3"),
        (["--model", str(MODEL), "--inputs", "no.safetensors"], "no.safetensors does not exist"),
        (["--model", "no-such-folder"], "no-such-folder"),
        (["--model", str(MODEL), "--inputs", str(INPUTS), "--tokens", "300"], "are 600, and"),
    ],
)
def test_run_refuses_in_plain_words(capsys, arguments, say):
    status, _, err = run(capsys, "run", "--backend", "reference", *arguments)
    assert status == 2
    assert "megamoe: error: " in err and say in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_gluon_without_a_gpu_is_an_error(capsys):
    status, out, err = run(capsys, "run", "--backend", "gluon", "--shape", "8,256,256,8,2")
    assert status == 2 and out == ""
    assert "--backend gluon cannot run here: no NVIDIA GPU was found" in err


# trial: inputs

CONFIG = MoEConfig(
    hidden=64, intermediate=64, experts=8, topk=4, ranks=2, capacity=512, recipe="bf16"
)


@pytest.mark.parametrize("routing", trial.ROUTINGS)
def test_random_inputs_are_repeatable_and_routed_as_named(routing):
    first, again, other = (
        trial.random_inputs(CONFIG, tokens=500, routing=routing, seed=seed) for seed in (3, 3, 4)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.x, again.x, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(first.topk_idx, again.topk_idx, strict=True))
    assert not torch.equal(first.x[0], other.x[0])
    assert [x.shape for x in first.x] == [(500, 64)] * 2
    torch.testing.assert_close(first.topk_weights[0].sum(1), torch.ones(500))
    counts = first.tokens_per_expert(8)
    assert sum(counts) == 2 * 500 * 4
    if routing == "one-expert":
        assert counts[0] == 4000
        return
    assert all(len(set(row)) == 4 for row in first.topk_idx[0].tolist())
    spread = max(counts) / min(counts)
    assert spread < 1.3 if routing == "uniform" else spread > 2


def test_no_tokens_and_more_slots_than_experts_are_legal():
    assert trial.random_inputs(CONFIG, tokens=0, routing="zipf", seed=0).x[1].shape == (0, 64)
    many = replace(CONFIG, topk=12)
    assert trial.random_inputs(many, tokens=3, routing="uniform", seed=0).topk_idx[0].shape == (
        3,
        12,
    )


def test_captured_rows_are_dealt_in_order():
    one = trial.captured_inputs(INPUTS, layer=0, ranks=1, tokens=None)
    three = trial.captured_inputs(INPUTS, layer=0, ranks=3, tokens=None)
    assert [len(x) for x in three.x] == [171, 171, 170]
    assert torch.equal(torch.cat(three.x), one.x[0])
    few = trial.captured_inputs(INPUTS, layer=0, ranks=2, tokens=5)
    assert torch.equal(few.x[1], one.x[0][5:10])
    assert torch.equal(few.expected, one.expected[:10])


# charts and progress


def test_sparkline_shows_an_empty_expert_and_the_fullest():
    assert sparkline([0, 1, 1000, 500]) == NONE + LEVELS[0] + LEVELS[-1] + LEVELS[3]
    assert sparkline([0, 0]) == NONE * 2 and sparkline([]) == ""
    assert len(sparkline(list(range(384)))) <= 64


def test_bars_are_one_per_expert_or_grouped():
    assert bars([0, 2, 4]) == ["0  0", "1  2  " + "█" * 20, "2  4  " + "█" * 40]
    grouped = bars([1] * 384)
    assert len(grouped) == MOST_BARS and grouped[0].split()[:2] == ["0-11", "12"]
    assert bars([0, 0]) == ["0  0", "1  0"]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_moves_on_a_terminal_and_leaves_nothing():
    stream = Terminal()
    with Progress(total=2, stream=stream) as progress:
        progress.step("first")
        progress.step("second")
    assert "\n" not in stream.getvalue()
    assert "[1/2] first" in stream.getvalue() and stream.getvalue().endswith("\r\x1b[K")


def test_progress_is_sparse_plain_lines_elsewhere(monkeypatch):
    clock = iter([0.0, 0.1, 0.2, 9.0])
    monkeypatch.setattr("megamoe.progress.time.monotonic", lambda: next(clock))
    stream = io.StringIO()
    with Progress(total=3, stream=stream) as progress:
        for name in ("a", "b", "c"):
            progress.step(name)
    assert stream.getvalue() == "[1/3] a\n[3/3] c\n"


# run: with the kernel


def tiny(**options: object) -> trial.Case:
    shape = {"tokens": 4, "hidden": 64, "intermediate": 64, "experts": 4, "topk": 2, "ranks": 2}
    options = {"recipe": "bf16", "routing": "uniform", "seed": 0} | options
    return trial.random_case(**(shape | options))


@pytest.fixture(scope="module")
def outcome() -> trial.Outcome:
    return trial.run_case(tiny(), backend="interpreter", programs=1)


def test_run_checks_launches_bits_counts_and_reference(outcome):
    assert outcome.passed
    names = [check.name for check in outcome.checks]
    assert names == ["one launch", "fused = chain", "expert counts", "reference"]
    assert [len(rank) for rank in outcome.launches] == [1, 1]
    assert [len(rank) for rank in outcome.chain_launches] == [5, 5]
    assert outcome.bit_equal_to_chain is True
    assert 0 < outcome.relative_error < 5e-3 and outcome.cosine > 0.9999
    assert sum(outcome.tokens_per_expert) == 2 * 4 * 2
    assert outcome.seconds == sum(outcome.parts.values()) > 0


def failing(outcome: trial.Outcome) -> list[str]:
    return [check.name for check in outcome.checks if not check.passed]


def test_each_check_fails_when_it_should(outcome):
    def fresh() -> trial.Outcome:
        return trial.Outcome(
            case=outcome.case,
            backend="interpreter",
            launches=outcome.launches,
            chain_launches=outcome.chain_launches,
            tokens_per_expert=list(outcome.tokens_per_expert),
        )

    launched_twice = fresh()
    launched_twice.launches = [["a"], ["a", "b"]]
    trial._check_launches(launched_twice)
    assert failing(launched_twice) == ["one launch"]

    one_bit = fresh()
    y = [torch.ones(4, 64), torch.ones(4, 64)]
    other = [y[0], y[1].clone()]
    other[1][3, 63] = 1.0 + 2**-20
    trial._check_bits(one_bit, y, other)
    assert failing(one_bit) == ["fused = chain"] and one_bit.bit_equal_to_chain is False
    assert "[1]" in one_bit.checks[0].say

    miscounted = fresh()
    miscounted.tokens_per_expert[0] += 1
    miscounted.tokens_per_expert[1] -= 1
    trial._check_counts(miscounted)
    assert failing(miscounted) == ["expert counts"]

    wrong = fresh()
    expected = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
    trial._check_reference(wrong, expected.roll(1, 0), expected)
    assert failing(wrong) == ["reference"]


def test_run_prints_and_writes_what_it_found(capsys, tmp_path):
    file = tmp_path / "result.json"
    status, out, err = run(
        capsys, "run", "--shape", "4,64,64,4,2", "--recipe", "mxfp4", "--backend", "interpreter",
        "--ranks", 2, "--programs", 1, "--seed", 5, "--routing", "one-expert", "--json", file,
    )  # fmt: skip
    assert status == 0, out
    assert "backend interpreter (asked for), ranks 2, recipe mxfp4, seed 5" in out
    assert "moe_kernel" in out and "1 launch on each of 2 ranks" in out
    assert "fused = chain    bit for bit" in out and "relative L2 error" in out
    assert f"0  16  {'█' * 40}" in out and "4 checks passed" in out
    assert "[1/4] layer 1/1: packing weights" in err
    answer = json.loads(file.read_text())
    assert set(answer) == KEYS
    assert answer["shape"] == {
        "tokens": [4, 4], "hidden": 64, "intermediate": 64, "experts": 4, "topk": 2
    }  # fmt: skip
    assert answer["bit_equal_to_chain"] is True and answer["tokens_per_expert"] == [16, 0, 0, 0]
    assert [len(names) for names in answer["launches"]] == [1, 1]


def test_kernel_on_a_trained_layer_agrees_with_transformers(capsys):
    status, out, _ = run(
        capsys, "run", "--model", MODEL, "--inputs", INPUTS, "--layer", 1, "--recipe", "bf16",
        "--backend", "interpreter", "--tokens", 6,
    )  # fmt: skip
    assert status == 0, out
    assert "ok    captured output" in out and "5 checks passed" in out


def test_auto_without_a_gpu_says_why(capsys, monkeypatch):
    monkeypatch.setattr(doctor, "gather", lambda: LAPTOP)
    status, out, _ = run(capsys, "run", "--shape", "2,64,64,4,2", "--programs", 1)
    assert status == 0
    assert "backend interpreter (not gluon: no NVIDIA GPU was found)" in out


def test_what_a_format_costs_is_a_note_and_no_check(capsys):
    status, out, _ = run(
        capsys, "run", "--model", MODEL, "--inputs", INPUTS, "--layer", 0, "--recipe", "fp8",
        "--backend", "interpreter", "--tokens", 3, "--programs", 1,
    )  # fmt: skip
    assert status == 0, out
    assert "note  captured output" in out and "4 checks passed" in out


@pytest.mark.parametrize("error", ["DataRace", "Deadlock"])
def test_a_fault_in_the_kernel_is_told_in_one_line(capsys, monkeypatch, error):
    from megamoe.interpreter import errors

    def faulty(*_: object, **__: object) -> None:
        raise getattr(errors, error)("dispatch.py:1: rank 0, program 0: a fault")

    monkeypatch.setattr(trial, "run_case", faulty)
    status, _, err = run(
        capsys, "run", "--shape", "2,64,64,4,2", "--backend", "interpreter", "--programs", 1
    )
    assert status == 1
    assert err == f"megamoe: {error}: dispatch.py:1: rank 0, program 0: a fault\n"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_kernel_on_a_trained_layer(capsys, recipe):
    status, out, _ = run(
        capsys, "run", "--model", MODEL, "--inputs", INPUTS, "--layer", 3, "--recipe", recipe,
        "--backend", "gluon", "--ranks", 1,
    )  # fmt: skip
    assert status == 0, out
    assert "backend gluon" in out and "checks passed" in out
