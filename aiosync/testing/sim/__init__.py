"""Deterministic simulation: whole programs on a virtual clock and a network that a seed controls.

:func:`simulate` runs unchanged asyncio code in simulated processes. Equal seeds give equal runs.
See ``docs/topics/simulation.md``.
"""

from aiosync.testing.sim.loop import Process, SimulationError
from aiosync.testing.sim.network import Network, Weather
from aiosync.testing.sim.world import World, simulate

__all__ = ["Network", "Process", "SimulationError", "Weather", "World", "simulate"]
