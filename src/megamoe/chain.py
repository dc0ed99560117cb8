"""The unfused five-step chain: dispatch, L1, activation and quantisation, L2, combine, a launch
each.

The launches run the roles of the mega-kernel one after another (:data:`megamoe.launch.CHAIN`),
over a pool that holds every block at once.  It is the baseline for time and the oracle for bits.
"""

from __future__ import annotations

from megamoe.config import MoEConfig
from megamoe.launch import CHAIN
from megamoe.plan import Plan

__all__ = ["CHAIN", "chain_plan"]


def chain_plan(config: MoEConfig, *, programs: int) -> Plan:
    """Regions for the chain: no ring, and room for the raw L1 accumulators."""
    return Plan(config, programs=programs, chain=True)
