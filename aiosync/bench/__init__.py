"""The benchmark behind ``aiosync bench``: aiosync, its peers and the machine's limits.

Each contender has a trainer process of its own (``_trainer``) with real worker processes
(``_worker``); the benchmark's process (``_run``) lets them take turns, block by block, on the work
that ``_plan`` lists. ``_limits`` are contenders too: the least that the machine must do for the
same bytes. ``_figures`` measures what is not a latency. ``_results`` is what comes out; ``_table``
and ``_plots`` show it, and ``_targets`` compares it with what aiosync wants to reach.

No public names: the command is the interface, and its JSON.
"""

from __future__ import annotations

__all__: list[str] = []
