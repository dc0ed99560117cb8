"""What this machine can run, and why not: facts are gathered once, then judged by pure functions.

At import time it needs only the standard library, so it still answers where torch is missing or
broken.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

BACKENDS = ("gluon", "interpreter", "reference")
MIN_PYTHON = (3, 10)
MIN_TORCH = (2, 9)
MIN_TRITON = (3, 6)
KERNEL_CAPABILITY = (9, 0)
GLUON_RANKS = 1  # ranks of the compiled kernel that one process runs
HIDE_TRITON = "MEGAMOE_HIDE_TRITON"

# Why a GPU of another generation cannot run the kernel, by major compute capability.
OTHER_GENERATIONS = {
    8: "Ampere and Ada have neither WGMMA nor TMA",
    10: "data-centre Blackwell replaced WGMMA by tcgen05, which the kernel does not use yet",
    11: "this Blackwell replaced WGMMA by tcgen05, which the kernel does not use yet",
    12: "consumer Blackwell (RTX 50, RTX PRO) has no WGMMA, and is not a small B200",
}


class BackendError(ValueError):
    """The requested backend cannot run on this machine."""


@dataclass(frozen=True, kw_only=True)
class Gpu:
    index: int
    name: str
    capability: tuple[int, int]
    memory_gib: float


@dataclass(frozen=True, kw_only=True)
class Module:
    """A Python package: its version, or the reason why it is not usable."""

    version: str | None = None
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What was found, not yet judged. `no_peer_access`: GPU pairs that cannot read each other."""

    python: tuple[int, int, int]
    system: str
    cores: int
    torch: Module
    triton: Module
    numpy: Module
    greenlet: Module
    safetensors: Module
    torch_cuda: str | None = None
    triton_hidden: bool = False
    driver: str | None = None
    gpu_seen: bool = False
    gpus: tuple[Gpu, ...] = ()
    no_peer_access: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Check:
    """One line of the verdict. `state`: "ok", "note" (something is not available) or "problem"."""

    name: str
    state: str
    found: str
    say: str = ""


@dataclass(frozen=True, kw_only=True)
class Backend:
    """Whether a backend runs here; `why` says why not, `ranks` how many a process (None: any)."""

    available: bool
    why: str = ""
    ranks: int | None = None


@dataclass(frozen=True, kw_only=True)
class Report:
    checks: list[Check]
    backends: dict[str, Backend]
    verdict: list[str] = field(default_factory=list)

    @property
    def can_run(self) -> list[str]:
        """Names of the backends that run here, the fastest first."""
        return [name for name in BACKENDS if self.backends[name].available]

    def to_dict(self) -> dict[str, Any]:
        return {
            "can_run": self.can_run,
            "backends": {name: asdict(backend) for name, backend in self.backends.items()},
            "checks": [asdict(check) for check in self.checks],
            "verdict": self.verdict,
        }


def gather() -> Facts:
    """Looks at this machine. Allocates nothing on a GPU and needs no network."""
    torch = _module("torch")
    hidden = triton_is_hidden()
    facts: dict[str, Any] = {
        "python": tuple(sys.version_info[:3]),
        "system": f"{platform.system()} {platform.machine()}",
        "cores": _cores(),
        "torch": torch,
        "triton": Module() if hidden else _module("triton"),
        "triton_hidden": hidden,
        "numpy": _module("numpy"),
        "greenlet": _module("greenlet"),
        "safetensors": _module("safetensors"),
        "driver": _driver(),
        "gpu_seen": Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists(),
    }
    if torch.version:
        facts |= _gpus(importlib.import_module("torch"))
    return Facts(**facts)


def triton_is_hidden() -> bool:
    """True where the environment asks for the stand-ins instead of an installed Triton."""
    return os.environ.get(HIDE_TRITON, "0") not in ("", "0")


def judge(facts: Facts) -> Report:
    """Turns facts into checks, backends and a verdict in plain words. Pure."""
    checks = [
        _python_check(facts),
        _torch_check(facts),
        _needed_check("numpy", facts.numpy),
        _needed_check("greenlet", facts.greenlet),
        _needed_check("safetensors", facts.safetensors),
        _triton_check(facts),
        *_gpu_checks(facts),
        _peer_check(facts),
        Check(name="cores", state="ok", found=str(facts.cores)),
    ]
    backends = {
        "gluon": _gluon(facts),
        "interpreter": _interpreter(facts),
        "reference": _reference(facts),
    }
    report = Report(checks=[check for check in checks if check], backends=backends)
    report.verdict.extend(_verdict(facts, report))
    return report


def examine() -> Report:
    """Gathers and judges in one step."""
    return judge(gather())


def choose_backend(requested: str, *, report: Report, ranks: int) -> tuple[str, str]:
    """Returns (backend, reason). "auto" prefers the compiled kernel; others are literal.

    Raises BackendError, in plain words, where the requested backend cannot run `ranks` ranks here.
    """
    if requested == "auto":
        return _choose(report, ranks)
    if requested not in BACKENDS:
        raise BackendError(f"unknown backend {requested!r}; known: auto, {', '.join(BACKENDS)}")
    obstacle = _obstacle(report.backends[requested], ranks)
    if obstacle:
        others = [name for name in report.can_run if name != requested]
        use = f" Use --backend {' or '.join(others)}." if others else ""
        raise BackendError(f"--backend {requested} cannot run here: {obstacle}.{use}")
    return requested, "asked for"


def _choose(report: Report, ranks: int) -> tuple[str, str]:
    passed_over = []
    for name in BACKENDS:
        obstacle = _obstacle(report.backends[name], ranks)
        if not obstacle:
            return name, "; ".join(passed_over) or "this machine has the GPU for it"
        passed_over.append(f"not {name}: {obstacle}")
    raise BackendError(f"nothing can run here: {'; '.join(passed_over)}")


def _obstacle(backend: Backend, ranks: int) -> str:
    if not backend.available:
        return backend.why
    if backend.ranks is not None and ranks > backend.ranks:
        return f"{ranks} ranks were asked for, and in one process it runs {backend.ranks}"
    return ""


def _module(name: str) -> Module:
    if importlib.util.find_spec(name) is None:
        return Module(problem="not installed")
    try:
        module = importlib.import_module(name)
    except Exception as error:  # a broken install may raise anything; the doctor reports it
        return Module(problem=f"installed, but its import fails: {type(error).__name__}: {error}")
    return Module(version=str(getattr(module, "__version__", "unknown")))


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _driver() -> str | None:
    path = Path("/proc/driver/nvidia/version")
    if path.exists():
        found = re.search(r"\b(\d{3}\.[\d.]+)\b", path.read_text())
        if found:
            return found.group(1)
    if not shutil.which("nvidia-smi"):
        return None
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = answer.stdout.split()
    return lines[0] if answer.returncode == 0 and lines else None


def _gpus(torch: Any) -> dict[str, Any]:
    facts: dict[str, Any] = {"torch_cuda": torch.version.cuda}
    if not torch.cuda.is_available():
        return facts
    gpus = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        gpus.append(
            Gpu(
                index=index,
                name=properties.name,
                capability=(properties.major, properties.minor),
                memory_gib=round(properties.total_memory / 2**30, 1),
            )
        )
    pairs = [(a.index, b.index) for a in gpus for b in gpus if a.index != b.index]
    facts["gpus"] = tuple(gpus)
    facts["no_peer_access"] = tuple(
        pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)
    )
    return facts


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.split("+")[0])[:2])


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _older(module: Module, least: tuple[int, int]) -> bool:
    return bool(module.version) and _numbers(module.version) < least


def _python_check(facts: Facts) -> Check:
    found = f"{_dotted(facts.python)} on {facts.system}"
    if facts.python[:2] < MIN_PYTHON:
        say = f"Python {_dotted(MIN_PYTHON)} or newer is needed"
        return Check(name="Python", state="problem", found=found, say=say)
    return Check(name="Python", state="ok", found=found)


def _torch_check(facts: Facts) -> Check:
    obstacle = _torch_obstacle(facts)
    if obstacle:
        return Check(
            name="torch",
            state="problem",
            found=facts.torch.version or facts.torch.problem or "",
            say=f"install torch >= {_dotted(MIN_TORCH)}",
        )
    build = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "CPU build"
    if facts.gpu_seen and not facts.torch_cuda:
        say = "this machine has an NVIDIA GPU, but this torch cannot use it: install a CUDA build"
        return Check(
            name="torch", state="problem", found=f"{facts.torch.version}, {build}", say=say
        )
    return Check(name="torch", state="ok", found=f"{facts.torch.version}, {build}")


def _needed_check(name: str, module: Module) -> Check:
    if module.version:
        return Check(name=name, state="ok", found=module.version)
    return Check(name=name, state="problem", found=module.problem or "", say=f"pip install {name}")


def _triton_check(facts: Facts) -> Check:
    def note(found: str, say: str) -> Check:
        return Check(name="Triton", state="note", found=found, say=say)

    if facts.triton_hidden:
        return note("hidden", f"{HIDE_TRITON} is set: interpreter only")
    if not facts.triton.version:
        say = "interpreter only; for the GPU: pip install 'megamoe[gpu]'"
        return note(facts.triton.problem or "not installed", say)
    if _older(facts.triton, MIN_TRITON):
        say = f"the kernel needs Triton >= {_dotted(MIN_TRITON)}: interpreter only"
        return note(facts.triton.version, say)
    return Check(name="Triton", state="ok", found=facts.triton.version)


def _gpu_checks(facts: Facts) -> list[Check]:
    if not facts.gpus:
        driver = f"driver {facts.driver}" if facts.driver else "no NVIDIA driver"
        say = "the compiled kernel needs an H100, H200 or GH200 (compute capability 9.0)"
        if facts.gpu_seen and facts.torch_cuda:
            say = "a device file is there, but torch cannot open it: is the driver too old for it?"
        return [Check(name="GPU", state="note", found=f"none usable ({driver})", say=say)]
    checks = []
    for gpu in facts.gpus:
        capability = _dotted(gpu.capability)
        found = f"{gpu.name}, capability {capability}, {gpu.memory_gib:g} GiB"
        runs = gpu.capability == KERNEL_CAPABILITY
        say = "" if runs else _other_generation(gpu.capability)
        name = f"GPU {gpu.index}"
        checks.append(Check(name=name, state="ok" if runs else "note", found=found, say=say))
    checks.append(Check(name="driver", state="ok", found=facts.driver or "unknown version"))
    return checks


def _other_generation(capability: tuple[int, int]) -> str:
    reason = OTHER_GENERATIONS.get(capability[0], "it has no WGMMA")
    return (
        f"not this one: the kernel is written for capability 9.0 (H100, H200, GH200), and {reason};"
        " here use --backend interpreter or reference"
    )


def _hopper(facts: Facts) -> list[Gpu]:
    return [gpu for gpu in facts.gpus if gpu.capability == KERNEL_CAPABILITY]


def _peer_check(facts: Facts) -> Check | None:
    if len(facts.gpus) < 2:
        return None
    if not facts.no_peer_access:
        return Check(name="peer access", state="ok", found=f"all {len(facts.gpus)} GPUs")
    pairs = ", ".join(f"{a}->{b}" for a, b in facts.no_peer_access[:8])
    say = "ranks read each other's memory: GPUs without that path cannot be ranks of one run"
    return Check(name="peer access", state="note", found=f"missing for {pairs}", say=say)


def _torch_obstacle(facts: Facts) -> str:
    if not facts.torch.version:
        return f"torch is {facts.torch.problem}"
    if _older(facts.torch, MIN_TORCH):
        return f"torch {facts.torch.version} is older than {_dotted(MIN_TORCH)}"
    return ""


def _base_obstacle(facts: Facts) -> str:
    if facts.python[:2] < MIN_PYTHON:
        return f"Python {_dotted(facts.python)} is older than {_dotted(MIN_PYTHON)}"
    return _torch_obstacle(facts)


def _gluon(facts: Facts) -> Backend:
    obstacle = _base_obstacle(facts) or _gluon_obstacle(facts)
    if obstacle:
        return Backend(available=False, why=obstacle, ranks=0)
    return Backend(available=True, ranks=GLUON_RANKS)


def _gluon_obstacle(facts: Facts) -> str:
    if not facts.gpus:
        if facts.gpu_seen and not facts.torch_cuda:
            return f"torch {facts.torch.version} is a CPU build and cannot use the NVIDIA GPU"
        return "no NVIDIA GPU was found"
    if not _hopper(facts):
        found = sorted({_dotted(gpu.capability) for gpu in facts.gpus})
        return f"the GPU has compute capability {' and '.join(found)}, and the kernel needs 9.0"
    if facts.triton_hidden:
        return f"Triton is hidden by {HIDE_TRITON}"
    if not facts.triton.version:
        return f"Triton is {facts.triton.problem}"
    if _older(facts.triton, MIN_TRITON):
        return f"Triton {facts.triton.version} is older than {_dotted(MIN_TRITON)}"
    return ""


def _interpreter(facts: Facts) -> Backend:
    obstacle = _base_obstacle(facts)
    for name in ("numpy", "greenlet"):
        module = getattr(facts, name)
        if not obstacle and not module.version:
            obstacle = f"{name} is {module.problem}"
    return Backend(available=not obstacle, why=obstacle)


def _reference(facts: Facts) -> Backend:
    obstacle = _base_obstacle(facts)
    return Backend(available=not obstacle, why=obstacle)


def _verdict(facts: Facts, report: Report) -> list[str]:
    describe = {
        "gluon": f"gluon (the compiled kernel, {report.backends['gluon'].ranks} rank a process)",
        "interpreter": "interpreter (the same kernel on this CPU, any number of simulated ranks)",
        "reference": "reference (plain torch)",
    }
    lines = [
        f"Not {name}: {backend.why}."
        for name, backend in report.backends.items()
        if not backend.available
    ]
    runs = "; ".join(describe[name] for name in report.can_run) or "nothing yet, see above"
    return [*lines, f"You can run: {runs}."]
