"""The commands `megamoe bench` and `megamoe trace`."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

RECIPES = ("bf16", "fp8", "fp8_block", "mxfp4")
ROUTINGS = ("balanced", "uniform", "zipf", "one-hot")
TOKENS = (1, 8, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
INTERPRETER_PROGRAMS = 2
SHAPE_HELP = (
    "flash (4096, 2048, 32 experts a rank, top-6), pro (7168, 3072, 48, top-6), a known model, or"
    " hidden,intermediate,experts-per-rank,topk"
)


def add_commands(commands: Any) -> None:
    """Adds both to the subparsers of the command line."""
    _add_bench(commands)
    _add_trace(commands)


def _integers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: give integers, as in 1,8,32") from None


def _names(text: str) -> tuple[str, ...]:
    return tuple(part for part in text.split(",") if part)


# --- bench ---------------------------------------------------------------------------------------


def _add_bench(commands: Any) -> None:
    command = commands.add_parser(
        "bench",
        help="time whole calls on this machine's GPUs, beside the machine's limits",
        description="Times whole calls, one process a GPU, beside the limits of this machine"
        " measured in the same run. Exit status 1 when a case fails or --check finds a loss.",
    )
    command.add_argument("--shape", nargs="+", default=["flash"], metavar="SHAPE", help=SHAPE_HELP)
    command.add_argument("--tokens", type=_integers, default=TOKENS, metavar="T,T",
                         help="tokens per rank (default 1 to 8192)")  # fmt: skip
    command.add_argument("--recipes", type=_names, default=("mxfp4", "fp8"), metavar="R,R",
                         help=f"of {', '.join(RECIPES)} (default mxfp4,fp8)")  # fmt: skip
    command.add_argument("--gpus", type=int, default=1, help="GPUs, a rank each (default 1)")
    command.add_argument("--routing", type=_names, default=("balanced",), metavar="R,R",
                         help=f"of {', '.join(ROUTINGS)} (default balanced)")  # fmt: skip
    command.add_argument("--samples", type=int, default=20, help="of each time (default 20)")
    command.add_argument("--no-chain", action="store_true",
                         help="neither compare with nor time the unfused chain")  # fmt: skip
    command.add_argument(
        "--api", choices=("symmetric", "local"), default="symmetric",
        help="symmetric: SymmetricMoE (default); local: as MegaMoE runs one rank",
    )  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="of weights, x and routing")
    command.add_argument("--json", type=Path, metavar="FILE", help="write the results as JSON")
    command.add_argument("--plot", type=Path, metavar="FILE.png",
                         help="plot time against tokens with the floor")  # fmt: skip
    command.add_argument(
        "--check", type=Path, metavar="FILE",
        help="a stored JSON: fail where a fraction of the floor has got worse by more than 8 %%",
    )  # fmt: skip
    command.set_defaults(command=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    from megamoe.bench import report as bench_report
    from megamoe.bench import run as bench

    options = bench.BenchOptions(
        shapes=tuple(arguments.shape),
        tokens=arguments.tokens,
        recipes=arguments.recipes,
        routings=arguments.routing,
        gpus=arguments.gpus,
        samples=arguments.samples,
        chain=not arguments.no_chain,
        api=arguments.api,
        seed=arguments.seed,
    )
    # what can be refused is refused before minutes are spent
    bench.require_gpus(options.gpus)
    stored = None if arguments.check is None else bench_report.load_rows(arguments.check)
    if arguments.plot is not None:
        bench_report.require_matplotlib()
    report = bench_report.Report(machine=bench.machine(), options=options)
    described = ", ".join(f"{name} {value}" for name, value in report.machine.items())
    print(f"{described}; {options.gpus} GPU(s), {options.samples} samples, seed {options.seed}")

    def take(result: bench.Limits | bench.Row) -> None:
        report.add(result)
        if isinstance(result, bench.Limits):
            print(bench_report.limits_line(result), bench_report.header_line(), sep="\n")
        else:
            print(bench_report.row_line(result))
        sys.stdout.flush()
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(report.to_dict(), indent=1) + "\n")

    bench.run_bench(options, report=take)
    if arguments.plot is not None:
        title = f"megamoe on {options.gpus} x {report.machine['gpu']}"
        bench_report.plot(report.rows, arguments.plot, title=title)
    losses = [] if stored is None else bench_report.regressions(report.rows, stored)
    for line in losses:
        print(f"LOSS {line}")
    if stored is not None and not losses:
        print(f"no loss against {arguments.check}")
    return 1 if report.failed or losses else 0


# --- trace ---------------------------------------------------------------------------------------


def _add_trace(commands: Any) -> None:
    command = commands.add_parser(
        "trace",
        help="record what every role did when: a Perfetto file, a picture, and five lines",
        description="Records one fused call. Writes trace.json (open it at ui.perfetto.dev) and"
        " trace.png. On the interpreter, time is simulated from a table of an H200's costs. With"
        " --gpus, ranks are aligned at their first event: the timers of GPUs are not in step.",
    )
    command.add_argument("--shape", "--model", dest="shape", default=None, metavar="SHAPE",
                         help=SHAPE_HELP + " (default flash; 512,256,8,4 on the"
                         " interpreter)")  # fmt: skip
    command.add_argument("--tokens", type=int, default=None,
                         help="tokens per rank (default 64)")  # fmt: skip
    command.add_argument("--ranks", type=int, default=1,
                         help="ranks, simulated in this process (default 1)")  # fmt: skip
    command.add_argument("--gpus", type=int, metavar="N",
                         help="GPUs, a rank and a process each, instead of --ranks")  # fmt: skip
    command.add_argument("--warm", action="store_true",
                         help="with --gpus: just after the same call (default: L2 is overwritten"
                         " before the call)")  # fmt: skip
    command.add_argument("--recipe", choices=RECIPES, default="mxfp4", help="default mxfp4")
    command.add_argument("--backend", choices=("auto", "gluon", "interpreter"), default="auto")
    command.add_argument("--routing", choices=ROUTINGS, default="balanced")
    command.add_argument("--programs", type=int, metavar="N",
                         help="programs (CTAs) per rank (default: every SM, or 2 on the"
                         " interpreter)")  # fmt: skip
    command.add_argument("--events", type=int, metavar="N",
                         help="places for events of each role (default: as many as the call"
                         " needs)")  # fmt: skip
    command.add_argument("--seed", type=int, default=0, help="of random data and of the schedule")
    command.add_argument("--out", type=Path, default=Path("."), metavar="DIR",
                         help="folder to write to (default: here)")  # fmt: skip
    command.set_defaults(command=_trace)


def _trace(arguments: argparse.Namespace) -> int:
    from megamoe.bench import cases as bench_cases
    from megamoe.timeline import events as timeline
    from megamoe.timeline import plot as timeline_plot

    trial = _trial(arguments)
    print(f"{trial.title}, seed {arguments.seed}")
    recorded = trial.record()
    figures = timeline.figures(recorded)
    print("\n".join(figures.lines()))
    arguments.out.mkdir(parents=True, exist_ok=True)
    timeline.write_perfetto(recorded, arguments.out / "trace.json")
    written = [arguments.out / "trace.json"]
    try:
        timeline_plot.plot(recorded, figures, arguments.out / "trace.png", title=trial.title)
        written.append(arguments.out / "trace.png")
    except bench_cases.BenchError as error:
        print(f"no picture: {error}")
    print("written:", ", ".join(map(str, written)))
    return 0


def _trial(arguments: argparse.Namespace) -> Any:
    """The call to be recorded; both kinds have a title and record()."""
    from megamoe.bench.cases import BenchError
    from megamoe.timeline import gpus as timeline_gpus
    from megamoe.timeline import trial as timeline_trial

    given = {
        "shape": arguments.shape,
        "tokens": 64 if arguments.tokens is None else arguments.tokens,
        "recipe": arguments.recipe,
        "routing": arguments.routing,
        "events": arguments.events,
        "seed": arguments.seed,
    }
    if arguments.gpus is None:
        if arguments.warm:
            raise BenchError(
                "--warm goes with --gpus; in one process L2 is as the call before left it"
            )
        return timeline_trial.make(
            **given,
            backend=arguments.backend,
            ranks=arguments.ranks,
            programs=arguments.programs,
        )
    if arguments.ranks != 1:
        raise BenchError(
            "give --gpus, a process a GPU, or --ranks, simulated in one process, not both"
        )
    if arguments.backend == "interpreter":
        raise BenchError("--gpus records the compiled kernel; --backend interpreter has no GPU")
    if arguments.programs is not None:
        raise BenchError("--programs goes without --gpus, where every rank takes all of its SMs")
    return timeline_gpus.make(**given, gpus=arguments.gpus, cold=not arguments.warm)
