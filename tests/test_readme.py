"""README.md tells the truth: its example is the file and runs, its commands, links, targets exist.

Why this grid is enough: everything in README.md that a machine can follow is followed, once.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from megamoe import cli

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
EXAMPLE = ROOT / "examples" / "quickstart.py"
COMMANDS = re.findall(r"^    (megamoe .*?)(?:\s+#.*)?$", README, flags=re.MULTILINE)
LINKS = re.findall(r"\]\(([^)]+)\)", README)


def test_readme_and_example_are_short():
    assert len(README.splitlines()) <= 120
    assert len(EXAMPLE.read_text().splitlines()) <= 30


def test_example_is_shown_as_it_is():
    (shown,) = re.findall(r"^```python\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)
    assert shown == EXAMPLE.read_text()


def test_example_runs():
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, str(EXAMPLE)]
    answer = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert answer.returncode == 0, answer.stderr
    found = re.search(r"relative_l2=([\d.e-]+)", answer.stdout)
    assert found and 0 < float(found.group(1)) < 0.02


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_parse(command):
    arguments = cli._parser().parse_args(command.split()[1:])
    assert callable(arguments.command)


def test_there_are_commands_and_links_to_try():
    assert len(COMMANDS) >= 4 and len(LINKS) >= 4


@pytest.mark.parametrize("link", [link for link in LINKS if not link.startswith("http")])
def test_local_links_exist(link):
    assert (ROOT / link).exists()


def test_make_targets_exist():
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^    make (\S+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


def test_files_in_the_layout_exist():
    layout = README.split("## Layout of the code")[1].split("## ")[0]
    names = re.findall(r"`([\w/]+(?:\.py|/))`", layout)
    inside = ROOT / "src" / "megamoe"
    missing = [n for n in names if not (inside / n).exists() and not list(inside.glob(f"*/{n}"))]
    assert len(names) >= 10 and not missing
