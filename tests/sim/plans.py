"""Plans of simulated runs, which a seed decides: who takes part, what goes wrong, and when."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from random import Random
from typing import Literal

from aiosync.testing.sim import Weather

_HAS_DELTAS = importlib.util.find_spec("zstandard") is not None

Kind = Literal["push", "parts", "per worker", "pull", "deltas", "shared memory"]
KINDS: tuple[Kind, ...] = ("push", "parts", "per worker", "pull", "deltas")
ALL_KINDS: tuple[Kind, ...] = (*KINDS, "shared memory")

WHATS = ("kill", "lose", "stop", "part", "reset", "leave")


@dataclass(frozen=True)
class Event:
    """Something that goes wrong.

    Attributes:
        at: Virtual time in seconds.
        what: ``"kill"``, ``"lose"``, ``"stop"``, ``"part"``, ``"reset"``, ``"leave"`` or
            ``"cancel"``.
        who: Name of the process.
        seconds: How long it lasts.
        awaits: Number of awaits in calls of the process after which the call is cancelled.
    """

    at: float
    what: str
    who: str
    seconds: float
    awaits: int = 0


@dataclass(frozen=True)
class Plan:
    """A simulated run.

    Attributes:
        seed: Decides the steps and the network.
        kind: What the programs do.
        server: True for a weight server between trainer and workers.
        workers: Number of workers.
        sends: Number of sends before the faults end.
        floats: Number of elements of the model.
        chunk_nbytes: As for the scheme.
        token: True to have a token.
        manual: True for workers that apply updates themselves.
        reconnect: As for the scheme of a worker.
        stall_timeout: As for the scheme of the trainer.
        named: True if each worker asks for its index.
        cancels: Chance that a call is cancelled.
        hooks: True for workers with an async hook, which sometimes refuses a version.
        require: As for the scheme of the trainer.
        weather: What happens to connections.
        events: What goes wrong, in the order of time.
        relays: Number of servers that follow the weight server, each the one before.
        streams: Connections of each link.
    """

    seed: int
    kind: Kind
    server: bool
    workers: int
    sends: int
    floats: int
    chunk_nbytes: int
    token: bool
    manual: bool
    reconnect: float | None
    stall_timeout: float
    named: bool
    cancels: float
    hooks: bool
    require: Literal["all"] | float
    weather: Weather
    events: tuple[Event, ...]
    relays: int = 0
    streams: int = 1

    def smaller(self) -> list[Plan]:
        """Return plans that are a little smaller, the smallest first."""
        found = []
        if self.workers > 1:
            last = f"worker {self.workers - 1}"
            events = tuple(each for each in self.events if each.who != last)
            found.append(replace(self, workers=self.workers - 1, events=events))
        if self.sends > 1:
            found.append(replace(self, sends=self.sends - 1))
        for index in range(len(self.events)):
            events = self.events[:index] + self.events[index + 1 :]
            found.append(replace(self, events=events))
        if self.relays:
            last = f"relay {self.relays}"
            events = tuple(each for each in self.events if each.who != last)
            found.append(replace(self, relays=self.relays - 1, events=events))
        if self.streams > 1:
            found.append(replace(self, streams=1))
        if self.cancels:
            found.append(replace(self, cancels=0.0))
        for fault in ("cuts", "loses", "half_closes", "corrupts", "fragments"):
            if getattr(self.weather, fault):
                found.append(replace(self, weather=replace(self.weather, **{fault: 0.0})))
        return found


def plan_for(seed: int, kind: Kind | None = None) -> Plan:
    """Return the plan of a seed."""
    random = Random(f"plan {seed}")
    chosen = random.choice(KINDS)
    kind = kind or chosen
    if kind == "deltas" and not _HAS_DELTAS:
        kind = "push"
    workers = random.randint(1, 4)
    server = random.random() < 0.35 and kind not in ("per worker", "deltas")
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
    if server:
        names.append("server")
    # Later additions have dice of their own, so that the plans of older seeds stay as they are.
    extra = Random(f"relays {seed}")
    server = server or (kind == "deltas" and extra.random() < 0.3)
    relays = extra.choice([0, 0, 1, 2]) if server else 0
    whats = random.sample(WHATS, random.randint(1, len(WHATS)))
    events = [
        Event(
            random.uniform(0, 20),
            random.choice(whats),
            random.choice(names),
            10 ** random.uniform(-3, 1.5),
        )
        for _ in range(random.choice([0, 1, 2, 4, 8]))
    ]
    for _ in range(extra.choice([0, 1, 3]) if relays else 0):
        what, who = extra.choice(WHATS), f"relay {extra.randint(1, relays)}"
        events.append(Event(extra.uniform(0, 20), what, who, 10 ** extra.uniform(-3, 1.5)))
    extra = Random(f"cancels {seed}")
    for _ in range(extra.choice([0, 2, 8])):
        at, who = extra.uniform(-5, 20), names[extra.randrange(1 + workers)]
        awaits = extra.randint(1, extra.choice([2, 8, 40]))
        events.append(Event(max(at, 0.0), "cancel", who, 0.0, awaits))
    if kind == "shared memory" or (chosen == kind and Random(f"memory {seed}").random() < 0.15):
        # The processes of one host end together with their trainer, and nothing is between them.
        kind, server, relays = "shared memory", False, 0
        events = [
            each
            for each in events
            if (each.who == "trainer" and each.what in ("stop", "cancel"))
            or (each.who.startswith("worker") and each.what in ("stop", "cancel", "kill", "leave"))
        ]
    # Smaller updates never travel as deltas.
    floats = 12_000 if kind == "deltas" else random.choice([8, 200, 3000])
    chunk_nbytes = max(64, -(-6 * floats // random.choice([1, 2, 5, 12]) // 64) * 64)
    return Plan(
        seed,
        kind,
        server,
        workers,
        random.randint(1, 8),
        floats,
        chunk_nbytes,
        random.random() < 0.5,
        random.random() < 0.2,
        random.choice([None, None, 30.0, 1.0, 0.0]),
        random.choice([60.0, 60.0, 3.0]),
        kind in ("per worker", "shared memory") or random.random() < 0.7,
        random.choice([0.0, 0.05, 0.2]),
        random.random() < 0.2,
        random.choice(["all", "all", "all", 0.5]),
        weather,
        tuple(sorted(events, key=lambda each: each.at)),
        relays,
        Random(f"streams {seed}").choice([1, 1, 1, 1, 1, 2, 4]),
    )
