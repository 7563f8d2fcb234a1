"""Plans of simulated runs, which a seed decides: who takes part, what goes wrong, and when."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from aiosync.testing.sim import Weather

_HAS_DELTAS = importlib.util.find_spec("zstandard") is not None

Kind = Literal["push", "parts", "per worker", "pull", "server", "deltas"]
KINDS: tuple[Kind, ...] = ("push", "parts", "per worker", "pull", "server", "deltas")


@dataclass(frozen=True)
class Event:
    """Something that goes wrong.

    Attributes:
        at: Virtual time in seconds.
        what: ``"kill"``, ``"lose"``, ``"stop"``, ``"part"``, ``"reset"`` or ``"leave"``.
        who: Name of the process.
        seconds: How long it lasts.
    """

    at: float
    what: str
    who: str
    seconds: float


@dataclass(frozen=True)
class Plan:
    """A simulated run.

    Attributes:
        seed: Decides the steps and the network.
        kind: What the programs do.
        workers: Number of workers.
        sends: Number of sends before the faults end.
        floats: Number of elements of the model.
        chunk_nbytes: As for the scheme.
        token: True to have a token.
        manual: True for workers that apply updates themselves.
        reconnect: As for the scheme of a worker.
        weather: What happens to connections.
        events: What goes wrong, in the order of time.
    """

    seed: int
    kind: Kind
    workers: int
    sends: int
    floats: int
    chunk_nbytes: int
    token: bool
    manual: bool
    reconnect: float | None
    weather: Weather
    events: tuple[Event, ...]

    def without(self, index: int) -> Plan:
        """Return the plan without one event."""
        return replace(self, events=self.events[:index] + self.events[index + 1 :])


def plan_for(seed: int, kind: Kind | None = None) -> Plan:
    """Return the plan of a seed."""
    random = Random(f"plan {seed}")
    chosen = random.choice(KINDS)
    kind = kind or chosen
    if kind == "deltas" and not _HAS_DELTAS:
        kind = "push"
    workers = random.randint(1, 4)
    bad = random.random() < 0.7
    low = 10 ** random.uniform(-5, -2)
    weather = Weather(
        latency=(low, low * random.uniform(1, 20)),
        capacity=(random.choice([256, 2048, 16_384]), 262_144),
        fragments=random.choice([0.0, 0.05, 0.3]),
        cuts=random.choice([0.0, 0.1, 0.4]) * bad,
        loses=random.choice([0.0, 0.0, 0.1]) * bad,
        half_closes=random.choice([0.0, 0.0, 0.1]) * bad,
        corrupts=random.choice([0.0, 0.0, 0.3]) * bad,
        within=random.choice([1000, 4000, 20_000, 100_000]),
    )
    names = ["trainer", *(f"worker {idx}" for idx in range(workers))]
    if kind == "server":
        names.append("server")
    whats = random.sample(["kill", "lose", "stop", "part", "reset", "leave"], random.randint(1, 6))
    events = [
        Event(
            random.uniform(0, 20),
            random.choice(whats),
            random.choice(names),
            10 ** random.uniform(-3, 1.5),
        )
        for _ in range(random.choice([0, 1, 2, 4, 8]))
    ]
    # Smaller updates never travel as deltas.
    floats = 12_000 if kind == "deltas" else random.choice([8, 200, 3000])
    chunk_nbytes = max(64, -(-6 * floats // random.choice([1, 2, 5, 12]) // 64) * 64)
    return Plan(
        seed,
        kind,
        workers,
        random.randint(1, 8),
        floats,
        chunk_nbytes,
        random.random() < 0.5,
        random.random() < 0.2,
        random.choice([None, None, 30.0]),
        weather,
        tuple(sorted(events, key=lambda each: each.at)),
    )
