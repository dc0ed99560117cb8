"""The command line: `megamoe doctor | plan | run | bench | trace`.

Exit status: 0 all well, 1 a check failed, 2 the request cannot be carried out (one line on stderr
says why).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from megamoe import cli_measure, doctor
from megamoe.charts import bars, sparkline
from megamoe.progress import Progress

SHAPE_FIELDS = ("tokens", "hidden", "intermediate", "experts", "topk")
RECIPES = ("bf16", "fp8", "fp8_block", "mxfp4")
LIVE_TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
DEFAULT_CAPACITY = 8192
MIB = 1 << 20


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status."""
    arguments = _parser().parse_args(argv)
    try:
        return arguments.command(arguments)
    except BrokenPipeError:
        return 1
    except _refusals() as error:
        print(f"megamoe: error: {error}", file=sys.stderr)
        return 2
    except _faults() as error:
        print(f"megamoe: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


def _faults() -> tuple[type[Exception], ...]:
    """What a kernel that ran and failed raises; its message says where."""
    try:
        from megamoe.interpreter.errors import KernelError
        from megamoe.symmetric import MegaMoEError
    except ImportError:
        return ()
    return (KernelError, MegaMoEError)


def _refusals() -> tuple[type[Exception], ...]:
    """The exceptions whose message is for the user; any other is a bug and keeps its trace."""
    try:
        from megamoe.bench.cases import BenchError
        from megamoe.checkpoint import WeightsError
        from megamoe.config import MegaMoEConfigError, MegaMoEInputError
        from megamoe.timeline.events import TimelineError
        from megamoe.trial import TrialError
    except (ImportError, OSError):  # torch is missing or broken: the doctor says so itself
        return (doctor.BackendError, OSError)
    return (
        doctor.BackendError,
        BenchError,
        MegaMoEConfigError,
        MegaMoEInputError,
        TimelineError,
        TrialError,
        WeightsError,
        OSError,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="megamoe",
        description="A Mixture-of-Experts forward under expert parallelism in one GPU kernel.",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    _add_doctor(commands)
    _add_plan(commands)
    _add_run(commands)
    cli_measure.add_commands(commands)
    return parser


def _add_doctor(commands: Any) -> None:
    command = commands.add_parser("doctor", help="what this machine can run, and why not")
    command.add_argument("--json", action="store_true", help="print the findings as JSON")
    command.add_argument("--short", action="store_true", help="print the verdict only")
    command.set_defaults(command=_doctor)


def _add_plan(commands: Any) -> None:
    command = commands.add_parser(
        "plan",
        help="the buffer of one rank, region by region, and the tiles; allocates nothing",
        description="The symmetric buffer of one rank, region by region, and the tiles by load.",
    )
    command.add_argument("model", nargs="?", metavar="MODEL", help="a known model's name")
    _add_shape(command)
    command.add_argument("--ranks", type=int, default=8, help="ranks (default 8)")
    command.add_argument("--recipe", choices=RECIPES, default="mxfp4", help="default mxfp4")
    command.add_argument("--x-scales", help="scale format of x (default: the recipe's)")
    command.add_argument(
        "--capacity",
        type=int,
        help=f"most tokens a rank may pass in one call (default: --shape's, or {DEFAULT_CAPACITY})",
    )
    command.add_argument("--tokens", type=int, help="tiles for this many live tokens per rank only")
    command.add_argument("--sms", type=int, help="SMs of the GPU (default: an H200's)")
    command.add_argument("--json", action="store_true", help="print the plan as JSON")
    command.set_defaults(command=_plan)


def _add_run(commands: Any) -> None:
    command = commands.add_parser(
        "run",
        help="run the kernel and check it against the chain and the reference",
        description="Runs the fused kernel, the unfused chain and the reference on the same inputs"
        " and compares them. Exit status 1 when a check fails.",
    )
    source = command.add_mutually_exclusive_group(required=True)
    source.add_argument("--model", type=Path, metavar="DIR", help="checkpoint folder (safetensors)")
    _add_shape(source)
    command.add_argument(
        "--layer", type=int, metavar="N", help="only layer N (default: every MoE layer)"
    )
    command.add_argument(
        "--inputs", type=Path, metavar="FILE",
        help="captured layer inputs (safetensors: layers.N.hidden_states, .topk_indices,"
        " .topk_weights and, to compare recipe bf16 with, .output); default: random",
    )  # fmt: skip
    command.add_argument("--ranks", type=int, default=2, help="ranks (default 2)")
    command.add_argument("--recipe", choices=RECIPES, default="mxfp4", help="default mxfp4")
    command.add_argument("--backend", choices=("auto", *doctor.BACKENDS), default="auto")
    command.add_argument(
        "--programs",
        type=int,
        help="programs (CTAs) per rank (default: every SM, or 2 on the interpreter)",
    )
    command.add_argument("--tokens", type=int, metavar="T", help="tokens per rank")
    command.add_argument(
        "--routing", choices=("uniform", "zipf", "one-expert"), default="uniform",
        help="how random tokens choose experts (default uniform)",
    )  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="of random data and of the schedule")
    command.add_argument("--json", type=Path, metavar="FILE", help="also write the results as JSON")
    command.set_defaults(command=_run)


def _add_shape(parser: Any) -> None:
    parser.add_argument("--shape", type=_shape, metavar=",".join(SHAPE_FIELDS),
                        help="five integers; tokens are per rank")  # fmt: skip


def _shape(text: str) -> dict[str, int]:
    parts = text.split(",")
    wanted = ",".join(SHAPE_FIELDS)
    if len(parts) != len(SHAPE_FIELDS):
        raise argparse.ArgumentTypeError(
            f"{text!r} has {len(parts)} numbers; give {len(SHAPE_FIELDS)}: {wanted}"
        )
    try:
        values = [int(part) for part in parts]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: {wanted} are integers") from None
    return dict(zip(SHAPE_FIELDS, values, strict=True))


# doctor


def _doctor(arguments: argparse.Namespace) -> int:
    report = doctor.examine()
    if arguments.json:
        print(json.dumps(report.to_dict(), indent=2))
    else:
        print("\n".join(_doctor_lines(report, short=arguments.short)))
    return 0 if report.can_run else 1


def _doctor_lines(report: doctor.Report, *, short: bool) -> list[str]:
    if short:
        return report.verdict
    marks = {"ok": "ok     ", "note": "note   ", "problem": "PROBLEM"}
    width = max(len(check.name) for check in report.checks)
    lines = []
    for check in report.checks:
        lines.append(f"{marks[check.state]}  {check.name:{width}}  {check.found}")
        if check.say:
            lines.append(f"{'':9}{'':{width}}  -> {check.say}")
    return [*lines, "", *report.verdict]


# plan


def _plan(arguments: argparse.Namespace) -> int:
    from megamoe.plan import Plan

    title, config = _plan_config(arguments)
    options = {} if arguments.sms is None else {"programs": arguments.sms}
    plan = Plan(config=config, **options)
    answer = _plan_answer(title, plan, arguments.tokens)
    print(json.dumps(answer, indent=2) if arguments.json else "\n".join(_plan_lines(answer)))
    return 0


def _plan_config(arguments: argparse.Namespace) -> tuple[str, Any]:
    from megamoe.config import MODELS, MegaMoEConfigError, MoEConfig, model_shape

    if (arguments.model is None) == (arguments.shape is None):
        raise MegaMoEConfigError(
            f"give either a model ({', '.join(MODELS)}) or --shape {','.join(SHAPE_FIELDS)}"
        )
    options = {
        "ranks": arguments.ranks,
        "recipe": arguments.recipe,
        "x_scales": arguments.x_scales,
        "capacity": DEFAULT_CAPACITY if arguments.capacity is None else arguments.capacity,
    }
    if arguments.model is not None:
        shape = model_shape(arguments.model)
        title = arguments.model + (f" ({shape.note})" if shape.note else "")
        return title, shape.config(**options)
    shape = dict(arguments.shape)
    tokens = shape.pop("tokens")
    if arguments.capacity is None:
        options["capacity"] = tokens
    return "custom shape", MoEConfig(**shape, **options)


def _plan_answer(title: str, plan: Any, tokens: int | None) -> dict[str, Any]:
    config = plan.config
    live = [tokens] if tokens is not None else [t for t in LIVE_TOKENS if t < config.capacity]
    if tokens is None:
        live.append(config.capacity)
    return {
        "title": title,
        "config": asdict(config),
        "programs": plan.programs,
        "nbytes": plan.nbytes,
        "unpacked_nbytes": plan.unpacked_bytes,
        "weight_nbytes": _weight_bytes(config),
        "regions": [_region(region) for region in plan.regions],
        "tiles": [_tiles(plan, count) for count in live],
    }


def _weight_bytes(config: Any) -> int:
    matrix = 3 * config.padded_hidden * config.padded_intermediate
    return config.experts_per_rank * matrix * config.weight_bits // 8


def _region(region: Any) -> dict[str, Any]:
    return {
        "name": region.name,
        "offset": region.offset,
        "nbytes": region.nbytes,
        "dtype": region.dtype,
        "shape": list(region.shape),
        "writer": region.writer,
        "reader": region.reader,
    }


def _tiles(plan: Any, tokens: int) -> dict[str, Any]:
    from megamoe.config import MegaMoEConfigError

    if not 1 <= tokens <= plan.config.capacity:
        raise MegaMoEConfigError(
            f"--tokens must be between 1 and the capacity {plan.config.capacity}, got {tokens}"
        )
    config = plan.config
    policy = plan.policy(tokens)
    return {
        "tokens": tokens,
        "tokens_per_expert": tokens * config.ranks * config.topk / config.experts,
        "family": policy.family,
        "block_m": policy.block_m,
        "block_n": policy.block_n,
        "block_k": policy.block_k,
        "stages": policy.stages,
        "ring_blocks": plan.ring_blocks(policy.block_m),
        "ring_rows": plan.ring_blocks(policy.block_m) * policy.block_m,
    }


def _unpacked_line(nbytes: int) -> list[str]:
    if not nbytes:
        return []
    what = "once for all layers: weights that the longest calls unpack"
    return [f"unpacked {nbytes / MIB:10.1f} MiB per rank ({nbytes} bytes) beside it, {what}"]


def _plan_lines(answer: dict[str, Any]) -> list[str]:
    config = answer["config"]
    per_rank = config["experts"] // config["ranks"]
    lines = [
        f"{answer['title']}: hidden {config['hidden']}, intermediate {config['intermediate']}, "
        f"{config['experts']} experts, top-{config['topk']}",
        f"recipe {config['recipe']}, x scales {config['x_scales']}, ranks {config['ranks']}, "
        f"{per_rank} experts each, at most {config['capacity']} tokens per rank, "
        f"{answer['programs']} SMs",
        "",
        "Symmetric buffer of one rank",
    ]
    rows = [
        (r["name"], str(r["offset"]), str(r["nbytes"]), r["dtype"], "x".join(map(str, r["shape"])),
         r["writer"], r["reader"])
        for r in answer["regions"]
        if r["nbytes"]
    ]  # fmt: skip
    header = ("region", "offset", "bytes", "dtype", "shape", "written by", "read by")
    lines += _table(header, rows, right=(1, 2))
    lines += [
        "",
        f"buffer   {answer['nbytes'] / MIB:10.1f} MiB per rank ({answer['nbytes']} bytes)",
        *_unpacked_line(answer["unpacked_nbytes"]),
        f"weights  {answer['weight_nbytes'] / MIB:10.1f} MiB per rank, scales not counted",
        "",
        "Tiles by live tokens per rank (results do not depend on them)",
    ]
    header = (
        "tokens",
        "per expert",
        "family",
        "tile (rows x tokens x K)",
        "stages",
        "pool ring, rows",
    )
    rows = [
        (
            str(t["tokens"]),
            f"{t['tokens_per_expert']:.1f}",
            t["family"],
            f"{t['block_n']} x {t['block_m']} x {t['block_k']}",
            str(t["stages"]),
            f"{t['ring_blocks']} x {t['block_m']} = {t['ring_rows']}",
        )
        for t in answer["tiles"]
    ]
    return lines + _table(header, rows, right=(0, 1, 4))


def _table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> list[str]:
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]

    def line(row: Sequence[str]) -> str:
        cells = [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        return ("  " + "  ".join(cells)).rstrip()

    return [line(header), *map(line, rows)]


# run


def _run(arguments: argparse.Namespace) -> int:
    report = doctor.examine()
    backend, why = doctor.choose_backend(arguments.backend, report=report, ranks=arguments.ranks)
    layers = _layers(arguments)
    print(
        f"backend {backend} ({why}), ranks {arguments.ranks}, recipe {arguments.recipe}, "
        f"seed {arguments.seed}"
    )
    outcomes = _run_layers(arguments, layers, backend)
    failed = any(not outcome.passed for outcome in outcomes)
    print(_verdict_line(outcomes))
    if arguments.json:
        arguments.json.write_text(json.dumps(_run_answer(outcomes), indent=2) + "\n")
    return 1 if failed else 0


def _layers(arguments: argparse.Namespace) -> list[int | None]:
    """The layers to run; [None] for random weights."""
    from megamoe.checkpoint import moe_layers
    from megamoe.trial import TrialError, captured_layers

    if arguments.shape is not None:
        for name in ("layer", "inputs"):
            if getattr(arguments, name) is not None:
                raise TrialError(f"--{name} goes with --model, not with --shape")
        return [None]
    layers = moe_layers(arguments.model)
    if not layers:
        raise TrialError(f"{arguments.model} holds no MoE layer under a known name")
    if arguments.inputs is not None:
        captured = captured_layers(arguments.inputs)
        layers = [layer for layer in layers if layer in captured]
    if arguments.layer is None:
        return layers
    if arguments.layer not in layers:
        raise TrialError(f"layer {arguments.layer} is not there; layers: {_comma(layers)}")
    return [arguments.layer]


def _run_layers(
    arguments: argparse.Namespace, layers: Sequence[int | None], backend: str
) -> list[Any]:
    from megamoe.trial import run_case

    steps = 1 if backend == "reference" else 4
    outcomes = []
    with Progress(total=steps * len(layers)) as progress:
        for number, layer in enumerate(layers, 1):
            where = f"layer {number}/{len(layers)}"
            outcome = run_case(
                _case(arguments, layer),
                backend=backend,
                programs=arguments.programs,
                seed=arguments.seed,
                progress=lambda what, where=where: progress.step(f"{where}: {what}"),
            )
            outcomes.append(outcome)
            progress.clear()
            print("\n".join(_outcome_lines(outcome, compact=len(layers) > 1)), flush=True)
    return outcomes


def _case(arguments: argparse.Namespace, layer: int | None) -> Any:
    from megamoe import trial

    options = {"ranks": arguments.ranks, "recipe": arguments.recipe}
    if layer is None:
        return trial.random_case(
            **arguments.shape,
            **options,
            live_tokens=arguments.tokens,
            routing=arguments.routing,
            seed=arguments.seed,
        )
    return trial.model_case(
        arguments.model,
        layer=layer,
        **options,
        inputs=arguments.inputs,
        tokens=arguments.tokens,
        routing=arguments.routing,
        seed=arguments.seed,
    )


def _outcome_lines(outcome: Any, *, compact: bool) -> list[str]:
    case = outcome.case
    config = case.config
    tokens = [len(x) for x in case.inputs.x]
    title = "random weights" if case.layer is None else f"layer {case.layer}"
    lines = [
        f"{title}: hidden {config.hidden}, intermediate {config.intermediate}, {config.experts} "
        f"experts, top-{config.topk}; tokens by rank {_comma(tokens)}"
    ]
    for check in outcome.checks:
        mark = {True: "ok  ", False: "FAIL", None: "note"}[check.passed]
        lines.append(f"  {mark}  {check.name:15}  {check.say}")
    counts = outcome.tokens_per_expert
    if compact:
        span = f"fewest {min(counts)}, most {max(counts)}"
        lines.append(f"  tokens per expert  {sparkline(counts)}  {span}")
    else:
        lines += ["  tokens per expert", *(f"    {bar}" for bar in bars(counts))]
    parts = ", ".join(f"{name} {seconds:.2f}" for name, seconds in outcome.parts.items())
    return [*lines, f"  seconds            {parts}"]


def _verdict_line(outcomes: Sequence[Any]) -> str:
    seconds = sum(outcome.seconds for outcome in outcomes)
    results = [check.passed for outcome in outcomes for check in outcome.checks]
    checks, failed = len(results) - results.count(None), results.count(False)
    verdict = f"{checks} checks passed" if checks else "nothing was checked"
    if failed:
        verdict = f"{failed} of {checks} checks FAILED"
    return f"{verdict}, {seconds:.1f} seconds"


def _run_answer(outcomes: Sequence[Any]) -> dict[str, Any]:
    """The JSON of a run; over several layers: the worst error, the sum of counts and seconds."""
    if len(outcomes) == 1:
        return _layer_answer(outcomes[0])
    parts = [_layer_answer(outcome) for outcome in outcomes]
    errors = [part["relative_error"] for part in parts if part["relative_error"] is not None]
    cosines = [part["cosine"] for part in parts if part["cosine"] is not None]
    equal = [part["bit_equal_to_chain"] for part in parts]
    counts = zip(*(part["tokens_per_expert"] for part in parts), strict=True)
    return {
        **parts[0],
        "bit_equal_to_chain": None if None in equal else all(equal),
        "relative_error": max(errors, default=None),
        "cosine": min(cosines, default=None),
        "tokens_per_expert": [sum(column) for column in counts],
        "seconds": sum(part["seconds"] for part in parts),
        "layers": [
            {"layer": outcome.case.layer, **part}
            for outcome, part in zip(outcomes, parts, strict=True)
        ],
    }


def _layer_answer(outcome: Any) -> dict[str, Any]:
    config = outcome.case.config
    return {
        "backend": outcome.backend,
        "ranks": config.ranks,
        "recipe": config.recipe,
        "shape": {
            "tokens": [len(x) for x in outcome.case.inputs.x],
            "hidden": config.hidden,
            "intermediate": config.intermediate,
            "experts": config.experts,
            "topk": config.topk,
        },
        "launches": outcome.launches,
        "bit_equal_to_chain": outcome.bit_equal_to_chain,
        "relative_error": outcome.relative_error,
        "cosine": outcome.cosine,
        "tokens_per_expert": outcome.tokens_per_expert,
        "seconds": outcome.seconds,
    }


def _comma(values: Sequence[object]) -> str:
    return ", ".join(map(str, values))


if __name__ == "__main__":
    sys.exit(main())
