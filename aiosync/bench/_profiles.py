"""The profiles: what a run measures unless options say otherwise.

Must not import torch, typer or rich.
"""

from __future__ import annotations

from collections.abc import Mapping

from aiosync.bench._contenders import CONTENDERS
from aiosync.bench._plan import ALL_CASES, Plan, cases_of
from aiosync.bench._results import LIMIT
from aiosync.bench._targets import TARGETS

__all__ = ["PROFILES"]

_LIMITS = {
    each.name for some in CONTENDERS.values() for each in some if each.name.startswith(LIMIT)
}
_MAIN = frozenset({"aiosync", "aiosync/facade", "aiosync/network", "torchrl", *_LIMITS})
_JUDGED = {target.case for target in TARGETS if target.case is not None}

PROFILES: Mapping[str, Plan] = {
    "quick": Plan(
        "quick",
        [
            *cases_of(("shm",), (("4x2", (1, 4)), ("1000x4KiB", (1,)), ("64MiB", (1,)))),
            *cases_of(("pipe",), (("4x2", (1,)), ("1000x4KiB", (1,)))),
            *cases_of(("tcp",), (("4x2", (1,)), ("64MiB", (1,)))),
        ],
        blocks=2,
        scale=0.5,
        contenders=_MAIN,
        surfaces_upto=1,
    ),
    # Every case that a target names; those of the targets for figures are among them.
    "targets": Plan(
        "targets",
        [case for case in ALL_CASES if case in _JUDGED],
        blocks=5,
        scale=0.5,
        contenders=_MAIN,
    ),
    "full": Plan("full", ALL_CASES, blocks=5),
}
"""By name."""
