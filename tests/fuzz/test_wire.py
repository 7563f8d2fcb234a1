"""The corpus of hostile streams and random mutations, checked by the invariant of the target."""

from __future__ import annotations

import random
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from aiosync.errors import FrameTooLarge, RemoteProtocolError, WireVersionMismatch
from aiosync.wire import READ_AHEAD_NBYTES, FrameStart
from tests.fuzz.make_corpus import corpus
from tests.fuzz.target import CORPUS, LIMITS, check, random_cuts, run_seed
from tests.unit._frames import SAMPLES, drive

FILES = sorted(path.name for path in CORPUS.glob("*.bin"))
ENDS = {
    "ok": "ok",
    "cut": "cut",
    "fail": RemoteProtocolError,
    "large": FrameTooLarge,
    "version": WireVersionMismatch,
}


def test_the_files_are_what_the_script_writes() -> None:
    streams = corpus()
    assert sorted(streams) == FILES, "run python -m tests.fuzz.make_corpus"
    changed = [name for name in FILES if (CORPUS / name).read_bytes() != streams[name]]
    assert changed == []


@pytest.mark.parametrize("name", FILES)
def test_a_corpus_file_ends_as_its_name_says(name: str) -> None:
    data = (CORPUS / name).read_bytes()
    events = check(data, random_cuts(random.Random(name), len(data)))
    end = ENDS[name.partition("-")[0]]
    assert events[-1] == end or events[-1][0] is end
    if name == "ok-every-message.bin":
        assert [event.message for event in events[:-1]] == SAMPLES
    if not name.startswith("ok"):
        assert sum(isinstance(event, FrameStart) for event in events) <= 1


@pytest.mark.parametrize("name", FILES)
def test_memory_is_bounded(name: str) -> None:
    """Allocations follow the bytes that have arrived, and never the sizes that they announce."""
    data = (CORPUS / name).read_bytes()
    bound = READ_AHEAD_NBYTES + LIMITS.max_header_nbytes + LIMITS.max_payload_nbytes
    bound += 8 * len(data) + 2**20
    if name.startswith("fail-manifest"):
        # Nested lists in a manifest take more memory, as docs/topics/wire-format.md says.
        bound += 2**23
    # The first run makes the allocations that are kept, so the second one does not count them.
    drive([data], LIMITS)
    tracemalloc.start()
    try:
        drive([data], LIMITS)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < bound


@pytest.mark.slow
def test_many_random_mutations() -> None:
    ends = [run_seed(seed)[-1] for seed in range(10_000, 14_000)]
    # The inputs are only useful if many of them parse, and many fail late.
    assert ends.count("ok") + ends.count("cut") > 200
    assert sum(end[0] is RemoteProtocolError for end in ends) > 1000


@given(st.binary(max_size=200), st.lists(st.integers(0, 200), max_size=6))
def test_any_bytes(data: bytes, cuts: list[int]) -> None:
    check(data, [cuts])
    check(b"AIOS\x02" + data, [cuts])
