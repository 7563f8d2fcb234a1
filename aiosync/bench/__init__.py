"""The benchmark behind ``aiosync bench``: aiosync beside the least that the machine must do.

Each contender has real worker processes. The trainers' halves of all contenders run in the
benchmark's own process (:func:`run`), where they take turns, block by block, on the cases of a
:class:`Plan`. The public interface is the command and its JSON. The names here are for benchmarks
that compare aiosync with more contenders, such as ``tests/bench``.
"""

from aiosync.bench._contenders import (
    LIMIT,
    PATIENCE,
    SCHEMES,
    WORKLOADS,
    AsyncTrainer,
    Case,
    Crew,
    Desk,
    Handle,
    Limit,
    Workload,
    ask_all,
    contenders_of,
    fill,
    wake_up,
    work_async,
)
from aiosync.bench._run import (
    Block,
    Machine,
    Missing,
    Plan,
    Results,
    Rounds,
    Timing,
    cases_of,
    choose,
    limit_of,
    machine,
    maybe,
    profiles,
    run,
    show,
)

__all__ = [
    "LIMIT",
    "PATIENCE",
    "SCHEMES",
    "WORKLOADS",
    "AsyncTrainer",
    "Block",
    "Case",
    "Crew",
    "Desk",
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
    "contenders_of",
    "fill",
    "limit_of",
    "machine",
    "maybe",
    "profiles",
    "run",
    "show",
    "wake_up",
    "work_async",
]
