"""Triton's cache: every process must find what another has compiled.

Triton's key of a function depends on which functions were hashed before it. Two fresh processes
that ask for the kernels in opposite orders stand for all orders: with three kernels that share
functions, the first one hashed decides the keys of the others.
"""

import os
import subprocess
import sys

import pytest

from megamoe.kernel.compat import TRITON_VERSION
from megamoe.launch import KERNELS

pytestmark = pytest.mark.skipif(TRITON_VERSION is None, reason="Triton is missing or hidden")

KEYS = """
import sys
from megamoe.launch import compiled_kernels
print(sorted((name, compiled_kernels()[name].cache_key) for name in sys.argv[1:]))
"""


def keys(prelude, *names):
    """The kernels' keys as a fresh process with another hash seed finds them."""
    ran = subprocess.run(
        [sys.executable, "-c", prelude + KEYS, *names],
        env=os.environ | {"PYTHONHASHSEED": str(len(prelude))},
        capture_output=True,
        text=True,
        check=True,
    )
    return ran.stdout


def test_keys_do_not_depend_on_what_a_process_asks_for_first():
    assert len(KERNELS) == 3
    first, second = keys("", *KERNELS), keys(" ", *reversed(KERNELS))
    assert first == second and all(name in first for name in KERNELS)
