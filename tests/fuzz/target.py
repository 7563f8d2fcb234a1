"""The fuzz target of the wire format, and a generator of inputs for it.

The invariant: any bytes in any cuts either parse or raise a documented ProtocolError; cuts never
change the events; memory is bounded by the limits.

Run ``python -m tests.fuzz.target 60`` to try random mutations for 60 seconds; a finding is an
AssertionError that shows the seed. :func:`check` is also the entry point for other fuzzers.
"""

from __future__ import annotations

import random
import struct
import sys
import time
import zlib
from pathlib import Path

from aiosync.errors import FrameTooLarge, RemoteProtocolError, WireVersionMismatch
from aiosync.types import Limits
from aiosync.wire import (
    FrameEnd,
    FrameStart,
    decode_header,
    encode_frame,
    encode_header,
)
from tests.unit._frames import SAMPLES, cut_at, drive

CORPUS = Path(__file__).parent / "corpus"
LIMITS = Limits(max_header_nbytes=2**17, max_payload_nbytes=2**17)
DOCUMENTED = (RemoteProtocolError, FrameTooLarge, WireVersionMismatch)


def check(data: bytes, cuts: list[list[int]]) -> list[object]:
    """Assert the invariant for some bytes and several ways to cut them.

    Args:
        data: What the peer sent, before it closed the link.
        cuts: For each way, the positions of its cuts.

    Returns:
        The events, in a form that compares by content.
    """
    events = _events([data])
    for positions in cuts:
        assert _events(cut_at(data, positions)) == events, f"cuts at {positions} changed the events"
    return events


def _events(pieces: list[bytes]) -> list[object]:
    seen: list[object] = []
    payload_nbytes = 0
    *events, end = drive(pieces, LIMITS, pieces=2)
    for event in events:
        if isinstance(event, FrameStart):
            payload_nbytes = event.payload_nbytes
            assert payload_nbytes <= LIMITS.max_payload_nbytes
            again = decode_header(
                encode_header(event.message, ext=event.ext, limits=LIMITS), limits=LIMITS
            )
            assert again == (event.message, event.ext or None), "it does not encode to itself"
        elif isinstance(event, bytes):
            assert len(event) == payload_nbytes
        else:
            assert isinstance(event, FrameEnd)
        seen.append(event)
    if isinstance(end, bool):
        return [*seen, "cut" if end else "ok"]
    assert type(end) in DOCUMENTED
    assert 0 < len(str(end)) < 1000
    return [*seen, (type(end), str(end))]


def mutate(rng: random.Random) -> bytes:
    """Make a stream of a few frames and damage it, mostly below the checksums."""
    frames = []
    for _ in range(rng.randint(1, 3)):
        payload = rng.randbytes(rng.choice([0, 0, 1, 17, 5000]))
        ext = {"slot": rng.randrange(9)} if rng.random() < 0.3 else None
        frame = bytearray(encode_frame(rng.choice(SAMPLES), len(payload), ext=ext))
        if rng.random() < 0.7:
            header = _damage(rng, frame[24:])
            frame[24:] = header
            # With a right checksum the decoder reads the damaged header.
            if rng.random() < 0.9:
                struct.pack_into("<II", frame, 8, len(header), zlib.crc32(header))
        frames.append(bytes(frame) + payload)
    stream = b"".join(frames)
    return bytes(_damage(rng, bytearray(stream))) if rng.random() < 0.2 else stream


def _damage(rng: random.Random, data: bytearray) -> bytearray:
    interesting = b"\x00\x01\x7f\x80\x81\x8f\x90\x9f\xa0\xbf\xc0\xc1\xc4\xc6\xc7\xc9\xca\xcf\xd3"
    interesting += b"\xd4\xd6\xd8\xd9\xdb\xdc\xdd\xde\xdf\xe0\xff"
    for _ in range(rng.randint(1, 3)):
        # This changes, inserts, removes, repeats or cuts off bytes.
        start = rng.randrange(len(data) + 1)
        stop = start + rng.choice([0, 1, 1, rng.randint(1, 8), rng.randint(1, 30), len(data)])
        byte = bytes([rng.choice([rng.choice(interesting), rng.randrange(256)])])
        data[start:stop] = rng.choice(
            [b"", byte, byte, data[start : start + 30] * rng.randint(1, 4)]
        )
    return data


def random_cuts(rng: random.Random, nbytes: int) -> list[list[int]]:
    """Return ways to cut: anywhere, into small pieces, and, up to 200 bytes, byte by byte."""
    ways = [[rng.randrange(nbytes + 1) for _ in range(4)], list(range(0, nbytes, 13))]
    if nbytes <= 200:
        ways.append(list(range(nbytes)))
    return ways


def run_seed(seed: int) -> list[object]:
    """Check the random input of a seed; return its events."""
    rng = random.Random(seed)
    data = mutate(rng)
    try:
        return check(data, random_cuts(rng, len(data)))
    except Exception as exc:  # the person who runs the fuzzer sees it, with the seed to repeat it
        raise AssertionError(f"seed {seed}, input {data[:200]!r}") from exc


def main(seconds: float) -> None:
    """Check random inputs for ``seconds`` seconds."""
    seed = first = random.SystemRandom().randrange(2**48)
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        run_seed(seed)
        seed += 1
    sys.stdout.write(f"{seed - first} inputs, no finding\n")


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10.0)
