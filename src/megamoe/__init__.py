"""One Mixture-of-Experts forward under expert parallelism in one GPU kernel, in Python from end to end."""

from megamoe.config import MegaMoEConfigError, MegaMoEInputError, MoEConfig
from megamoe.forward import MegaMoE
from megamoe.symmetric import MegaMoEError
from megamoe.weights import CheckpointExperts, pack_weights, quantise_experts

__version__ = "0.1.0"
__all__ = [
    "CheckpointExperts",
    "MegaMoE",
    "MegaMoEConfigError",
    "MegaMoEError",
    "MegaMoEInputError",
    "MoEConfig",
    "pack_weights",
    "quantise_experts",
]
