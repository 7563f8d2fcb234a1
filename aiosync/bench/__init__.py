"""The benchmark behind ``aiosync bench``: aiosync beside the least that the machine must do.

Each contender has real worker processes; the trainers' halves are in the benchmark's own
(:func:`run`), where they take turns, block by block, on the cases of a :class:`Plan`. The command
is the interface, and its JSON. The names here are for benchmarks that compare more: they
:func:`register` contenders.
"""

from aiosync.bench._limits import Limit, wake_up
from aiosync.bench._results import LIMIT, Machine, Missing, Results, Timing, limit_of, machine, show
from aiosync.bench._run import (
    CONTENDERS,
    Block,
    Contender,
    Plan,
    Rounds,
    cases_of,
    choose,
    maybe,
    profiles,
    register,
    run,
)
from aiosync.bench._work import (
    PATIENCE,
    WORKLOADS,
    AsyncTrainer,
    Case,
    Crew,
    Desk,
    FacadeTrainer,
    Handle,
    Workload,
    ask_all,
    fill,
    work_async,
    work_facade,
)

__all__ = [
    "CONTENDERS",
    "LIMIT",
    "PATIENCE",
    "WORKLOADS",
    "AsyncTrainer",
    "Block",
    "Case",
    "Contender",
    "Crew",
    "Desk",
    "FacadeTrainer",
    "Handle",
    "Limit",
    "Machine",
    "Missing",
    "Plan",
    "Results",
    "Rounds",
    "Timing",
    "Workload",
    "ask_all",
    "cases_of",
    "choose",
    "fill",
    "limit_of",
    "machine",
    "maybe",
    "profiles",
    "register",
    "run",
    "show",
    "wake_up",
    "work_async",
    "work_facade",
]
