"""Gluon under one set of names: Triton 3.6 to the newest, or the interpreter's stand-ins where
there is no Triton.

This is the only file that knows Triton's versions.  ``MEGAMOE_HIDE_TRITON=1`` pretends that Triton
is missing.
"""

from __future__ import annotations

import os

try:
    if os.environ.get("MEGAMOE_HIDE_TRITON", "0") not in ("", "0"):
        raise ImportError("Triton is hidden by MEGAMOE_HIDE_TRITON")
    import triton
    from triton.experimental import gluon
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.language.nvidia.hopper import (
        fence_async_shared,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    TRITON_VERSION: str | None = triton.__version__
except ImportError:
    from megamoe.interpreter.standin import (
        fence_async_shared,
        gl,
        gluon,
        mbarrier,
        tma,
        warpgroup_mma,
        warpgroup_mma_wait,
    )

    TRITON_VERSION = None

# Triton <= 3.7 says thread_barrier, later ones barrier
cta_barrier = getattr(gl, "barrier", None) or gl.thread_barrier
# Triton <= 3.7 says async_copy_global_to_shared; in 3.9 that name exists but raises
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared

_aggregate = getattr(gluon, "aggregate", None)
if _aggregate is None:
    from triton.language.core import _aggregate


def aggregate(cls: type) -> type:
    """Gluon's aggregate; keeps the plain class for the interpreter."""
    result = _aggregate(cls)
    result.plain = cls
    return result


def ast_source(
    function: object, signature: dict[str, str], constants: dict[str, object], attributes: dict
) -> object:
    """What `triton.compile` takes for a Gluon function, to compile it without a GPU."""
    # Triton 3.6 keeps it in a private module, 3.9 in a public one
    source = getattr(gluon, "GluonASTSource", None)
    if source is None:
        from triton.experimental.gluon._runtime import GluonASTSource as source
    return source(function, signature, constants, attributes)


def load_module(compiled: object) -> None:
    """Load a compiled kernel onto the device now: its first launch would wait for whatever runs
    there.
    """
    compiled._init_handles()


# private in Triton 3.6, public in 3.9
if hasattr(gl.shared_memory_descriptor, "reinterpret"):

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Another view of shared memory."""
        return memory.reinterpret(dtype, shape, layout)

else:

    @gluon.jit
    def reinterpret(memory, dtype: gl.constexpr, shape: gl.constexpr, layout: gl.constexpr):
        """Another view of shared memory."""
        return memory._reinterpret(dtype, shape, layout)


__all__ = [
    "TRITON_VERSION",
    "aggregate",
    "ast_source",
    "cta_barrier",
    "fence_async_shared",
    "gl",
    "gluon",
    "load_module",
    "mbarrier",
    "reinterpret",
    "tma",
    "tma_load",
    "warpgroup_mma",
    "warpgroup_mma_wait",
]
