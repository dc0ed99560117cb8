"""One Mixture-of-Experts forward under expert parallelism in one GPU kernel, in Python."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megamoe.checkpoint import CheckpointExperts, quantise_experts
    from megamoe.config import MegaMoEConfigError, MegaMoEInputError, MoEConfig
    from megamoe.distributed import SymmetricMoE
    from megamoe.forward import MegaMoE
    from megamoe.symmetric import MegaMoEError
    from megamoe.weights import pack_weights

__version__ = "0.1.0"
__all__ = [
    "CheckpointExperts",
    "MegaMoE",
    "MegaMoEConfigError",
    "MegaMoEError",
    "MegaMoEInputError",
    "MoEConfig",
    "SymmetricMoE",
    "pack_weights",
    "quantise_experts",
]
_HOME = {
    "CheckpointExperts": "checkpoint",
    "MegaMoE": "forward",
    "MegaMoEConfigError": "config",
    "MegaMoEError": "symmetric",
    "MegaMoEInputError": "config",
    "MoEConfig": "config",
    "SymmetricMoE": "distributed",
    "pack_weights": "weights",
    "quantise_experts": "checkpoint",
}


def __getattr__(name: str) -> Any:
    # Imported when asked for, so that `megamoe doctor` answers where torch is missing or broken.
    if name not in _HOME:
        raise AttributeError(f"module 'megamoe' has no attribute {name!r}")
    return getattr(import_module(f"megamoe.{_HOME[name]}"), name)
