"""What ``aiosync bench`` found: as JSON, as tables, against the targets, as pictures."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("rich")

from rich.console import Console

from aiosync.bench._contenders import CONTENDERS, TRANSPORTS
from aiosync.bench._machine import machine
from aiosync.bench._plan import WORKLOAD_NAMES
from aiosync.bench._profiles import PROFILES
from aiosync.bench._results import Case, Figure, Machine, Missing, Results, Timing
from aiosync.bench._table import failures, install_advice, show, show_seconds, to_markdown
from aiosync.bench._targets import TARGETS, judge, limit_of, ratio, share_of_limit, throughput
from aiosync.bench._workloads import WORKLOADS

SMALL = Case("shm", "4x2", 1)
LARGE = Case("shm", "512MiB", 4)
BUSY = replace(SMALL, busy=True)
TRACEBACK = """Traceback (most recent call last):
  File "x.py", line 1, in <module>
RuntimeError: a worker: AssertionError: p0 has values from 1.0 to 2.0, the trainer sent 2.0
"""


def timing(case: Case, contender: str, milliseconds: float) -> Timing:
    """Ten sends: from nine tenths of that to eleven tenths."""
    seconds = [milliseconds / 1e3 * (0.9 + 0.2 * step / 10) for step in range(11)]
    return Timing(case, contender, seconds, 0.25, 0.5)


def made_up() -> Results:
    results = Results(Machine(2, 24.0, "Linux 6.1 x86_64", {"torch": "2.13.0"}), "full", 65.0)
    results.timings = [
        timing(SMALL, "aiosync", 0.1),
        timing(SMALL, "aiosync/facade", 0.2),
        timing(SMALL, "torchrl", 0.6),
        timing(SMALL, "limit/round trip", 0.05),
        timing(SMALL, "limit/memcpy", 0.001),
        timing(LARGE, "aiosync", 100),
        timing(LARGE, "torchrl", 1500),
        timing(LARGE, "limit/round trip", 0.08),
        timing(LARGE, "limit/memcpy", 150),
        timing(LARGE, "limit/memcpy all threads", 90),
        timing(BUSY, "aiosync", 0.4),
        timing(BUSY, "torchrl", 0.4),
    ]
    results.figures = [
        Figure("loop lag p99", "tcp", "512MiB", 1, "aiosync", 4.0, "ms", "of 400"),
        Figure("loop lag p99", "unix", "512MiB", 1, "aiosync", 6.0, "ms", "of 500"),
        Figure("loop lag p99", "unix", "512MiB", 1, "aiosync/asyncio", 9.0, "ms"),
        Figure("CPU per GB", "shm", "512MiB", 4, "torchrl", 1234.5, "s"),
        Figure("idle wake-ups", "shm", "4x2", 1, "aiosync", 0.0, "1/s"),
    ]
    results.missing = [
        Missing("rpc 4x2 to 8, torchrl", TRACEBACK),
        Missing("ray, torchrl", "not installed: torchrl, ray"),
        Missing("shm, torchrl", "not installed: torchrl"),
    ]
    return results


# -- JSON -------------------------------------------------------------------------------------


def test_json_and_back() -> None:
    results = made_up()
    text = results.to_json()
    assert Results.from_json(text) == results
    first = json.loads(text)["timings"][0]
    assert first["median"] == pytest.approx(1e-4)
    assert first["p10"] < first["median"] < first["p90"] <= first["p99"] <= max(first["seconds"])


def test_another_schema_is_refused() -> None:
    values = json.loads(made_up().to_json())
    with pytest.raises(ValueError, match="schema 0"):
        Results.from_json(json.dumps({**values, "schema": 0}))
    with pytest.raises(ValueError, match="schema None"):
        Results.from_json("{}")


def test_one_send_has_percentiles() -> None:
    lone = Timing(SMALL, "aiosync", [0.5], 0.0, 0.0)
    assert lone.percentile(10) == lone.median == lone.percentile(99) == 0.5


# -- reading them -----------------------------------------------------------------------------


def test_ratios_and_limits() -> None:
    results = made_up()
    assert ratio(results, SMALL) == pytest.approx(6)
    assert ratio(results, SMALL, "aiosync/facade") == pytest.approx(3)
    assert ratio(results, Case("tcp", "4x2", 1)) is None
    # The longest, but no copy by one thread where all of them copied.
    limit = limit_of(results, LARGE)
    assert limit is not None and limit.contender == "limit/memcpy all threads"
    assert share_of_limit(results, LARGE, limit) == pytest.approx(0.9)
    # A busy case has the limits of the quiet one.
    limit = limit_of(results, BUSY)
    assert limit is not None and limit.contender == "limit/round trip"
    assert limit_of(results, Case("tcp", "4x2", 1)) is None
    ours = results.timing(LARGE, "aiosync")
    assert ours is not None
    assert throughput(ours) == pytest.approx(2**29 / 0.1)
    assert throughput(timing(Case("shm", "of the future", 1), "aiosync", 1)) is None


def test_targets() -> None:
    found = {verdict.text: (verdict.found, verdict.met) for verdict in judge(made_up())}
    assert len(found) == len(TARGETS)  # no two have the same text
    assert found["shm 4x2 to 1: TorchRL / aiosync"] == ("6x", True)
    assert found["shm 4x2 to 1, aiosync/facade: TorchRL / aiosync"] == ("3x", True)
    assert found["shm 512MiB to 4: TorchRL / aiosync"] == ("15x", True)
    assert found["shm 4x2 to 1, busy: TorchRL / aiosync"] == ("1x", False)
    assert found["shm 512MiB to 4: speed, of that of memcpy all threads"] == ("0.90", True)
    assert found["tcp 512MiB to 1: speed, of that of raw socket"] == (None, None)
    assert found["loop lag p99, unix 512MiB (the worst of 2)"] == ("6 ms", False)
    assert found["idle wake-ups, shm 4x2"] == ("0 1/s", True)
    assert found["extra memory on the host, shm"] == (None, None)


def test_a_delivery_is_compared_with_its_limit() -> None:
    results = made_up()
    case = Case("tcp", "512MiB", 1)
    text = "tcp 512MiB to 1, until delivered: speed, of that of raw socket"

    def found() -> tuple[str | None, bool | None]:
        return {each.text: (each.found, each.met) for each in judge(results)}[text]

    assert found() == (None, None)
    results.timings.append(timing(case, "limit/raw socket", 150))
    assert found() == (None, None)
    results.figures += [
        Figure("delivery", "unix", "512MiB", 1, "aiosync", 1.0, "ms"),
        Figure("delivery", "tcp", "512MiB", 1, "aiosync/asyncio", 1.0, "ms"),
        Figure("delivery", "tcp", "512MiB", 1, "aiosync", 200.0, "ms"),
    ]
    assert found() == ("0.75", False)


@pytest.mark.parametrize("profile", ["targets", "full"])
def test_every_target_is_about_something_that_is_measured(profile: str) -> None:
    whole = PROFILES[profile]
    for target in TARGETS:
        case = target.case
        if case is None:
            continue
        assert case in whole.cases
        names = {each.name for each in CONTENDERS[case.transport] if whole.takes(case, each.name)}
        limits = {f"limit/{name}" for name in getattr(target, "limits", ())}
        assert limits <= names
        assert {"torchrl", getattr(target, "contender", "aiosync")} <= names


def test_the_targets_profile_has_nothing_else() -> None:
    judged = {target.case for target in TARGETS}
    assert all(case in judged for case in PROFILES["targets"].cases)
    assert len(PROFILES["targets"].cases) < len(PROFILES["full"].cases) / 2


def test_busy_workers_may_cost_half_of_the_advantage() -> None:
    wanted = {verdict.text: verdict.wanted for verdict in judge(made_up())}
    assert wanted["pipe 4x2 to 1: TorchRL / aiosync"] == "at least 8x"
    assert wanted["pipe 4x2 to 1, busy: TorchRL / aiosync"] == "at least 4x"


def test_names_agree() -> None:
    assert tuple(WORKLOADS) == WORKLOAD_NAMES
    for plan in PROFILES.values():
        for case in plan.cases:
            assert case.transport in TRANSPORTS
            assert case.workload in WORKLOADS
            assert plan.sends(case) >= 2


# -- showing them -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (12.34e-6, "12.3 µs"),
        (1.234e-6, "1.23 µs"),
        (123.4e-6, "123 µs"),
        (1.234e-3, "1.23 ms"),
        (1.2345, "1234 ms"),
    ],
)
def test_durations(seconds: float, text: str) -> None:
    assert show_seconds(seconds) == text


def shown(results: Results, width: int = 160) -> str:
    stream = io.StringIO()
    show(results, Console(file=stream, highlight=False, width=width))
    return stream.getvalue()


def rows(text: str) -> list[list[str]]:
    """Cells of a table's lines."""
    return [
        [cell.strip() for cell in re.split("[│|]", line)[1:-1]]
        for line in text.splitlines()
        if line.startswith(("│", "|"))
    ]


def test_the_tables() -> None:
    text = shown(made_up())
    lines = rows(text)
    at = next(index for index, line in enumerate(lines) if line[:2] == ["4x2", "1"])
    assert lines[at] == ["4x2", "1", "100 µs", "200 µs", "600 µs", "50.0 µs", "6x", "0.50"]
    assert lines[at + 1][2:] == [
        "92.0 - 108",
        "184 - 216",
        "552 - 648",
        "round trip",
        "facade 3x",
        "",
    ]
    large = next(line for line in lines if line[0] == "512MiB")
    assert large == ["512MiB", "4", "100 ms", "-", "1500 ms", "90.0 ms", "15x", "0.90"]
    assert "5.37 GB/s" in text
    assert next(line for line in lines if line[1] == "1 busy")[-1] == "0.12"
    assert ["CPU per GB", "s", "shm", "512MiB", "4", "-", "-", "1,234"] in lines
    assert "loop lag p99: of 400 (tcp, aiosync); of 500 (unix, aiosync)" in text
    assert "Targets: 5 of 7 met" in text
    assert "Linux 6.1 x86_64" in text
    assert "rpc 4x2 to 8, torchrl: RuntimeError: a worker: AssertionError: p0" in text
    assert "Traceback" not in text


def test_the_tables_fit_a_narrow_terminal() -> None:
    assert max(map(len, shown(made_up(), width=80).splitlines())) <= 80


def test_the_tables_as_markdown() -> None:
    text = to_markdown(made_up())
    lines = rows(text)
    assert ["4x2", "1", "100 µs (92.0 - 108)", "200 µs (184 - 216)"] in [line[:4] for line in lines]
    assert "### Transport shm: send to applied\n\n| work | workers | aiosync |" in text
    # Every row of a table has as many cells as its head.
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.replace(r"\|", "").count("|") for line in table.splitlines()}) == 1
    assert "p0 has values" in text
    assert text.endswith("\n") and not text.endswith("\n\n")


def test_what_is_in_an_error_does_not_break_the_markdown() -> None:
    results = made_up()
    results.missing = [Missing("shm, torchrl", "ValueError: a | b <c> *d*\n")]
    assert r"ValueError: a \| b \<c\> \*d\*" in to_markdown(results)


def test_nothing_at_all() -> None:
    nothing = Results(made_up().machine, "quick")
    assert "Nothing was measured." in shown(nothing)
    assert "Nothing was measured." in to_markdown(nothing)


def test_what_is_missing() -> None:
    results = made_up()
    assert len(failures(results)) == 1
    torchrl, ray = install_advice(results)
    assert "ray, torchrl; shm, torchrl" in torchrl
    assert torchrl.endswith("pip install 'aiosync[torchrl]'")
    assert ray.endswith("pip install 'aiosync[ray]'")


def test_this_machine() -> None:
    found = machine()
    assert found.cores >= 1
    assert found.memory_gib >= 0
    assert {"python", "aiosync", "torch"} <= set(found.versions)


# -- pictures ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fonts(tmp_path_factory: pytest.TempPathFactory) -> None:
    """matplotlib keeps the fonts open that it has drawn with; that is no leak of a test."""
    pytest.importorskip("matplotlib")
    from aiosync.bench._plots import save_plots

    save_plots(made_up(), tmp_path_factory.mktemp("fonts"))


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_pictures(tmp_path: Path) -> None:
    from aiosync.bench._plots import NAMES, save_plots

    folder = tmp_path / "new"
    results = made_up()
    results.timings.append(timing(Case("tcp", "64MiB", 1), "something else", 20))
    written = save_plots(results, folder)
    assert written == [folder / name for name in NAMES]
    for path in written:
        assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.usefixtures("fonts")
def test_no_pictures_of_nothing(tmp_path: Path) -> None:
    from aiosync.bench._plots import save_plots

    results = made_up()
    results.timings = [each for each in results.timings if each.case == LARGE]
    assert [path.name for path in save_plots(results, tmp_path / "some")] == ["ratio.png"]
    results.timings = []
    assert save_plots(results, tmp_path / "none") == []
    assert not (tmp_path / "none").exists()
