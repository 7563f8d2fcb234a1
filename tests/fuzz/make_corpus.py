"""Write the corpus of hostile streams: ``python -m tests.fuzz.make_corpus``.

The first word of a file's name says how the stream has to end: ``ok`` parses to a clean end,
``cut`` ends inside a frame, ``fail`` breaks the rules, ``large`` is over a limit and ``version``
has another wire version. The limits are those of :mod:`tests.fuzz.target`. The files are kept in
the repository so that other implementations can use them; a test compares them with the streams
of this script.
"""

from __future__ import annotations

import struct

import msgpack

from aiosync.types import AckStatus
from aiosync.wire import Ack, ManifestMessage, Update, encode_frame
from tests.fuzz.target import CORPUS
from tests.unit._frames import DIGEST, MANIFEST, SAMPLES, raw_frame, raw_header

# An acknowledgement as the release with wire version 1 wrote it.
_VERSION_1 = raw_frame(
    msgpack.packb({"t": "ack", "epoch": 1, "version": 2, "status": 2}), version=1
)


def _manifest(*records: object) -> bytes:
    body = b"".join(map(msgpack.packb, records))
    return _raw("manifest", manifest=body)


def _leaf(**changes: object) -> list[object]:
    fields = {
        "name": "a",
        "dtype": "float32",
        "shape": [2],
        "offset": 0,
        "nbytes": 8,
        "kind": "param",
        "aliases": [],
    }
    return list({**fields, **changes}.values())


def _nested(depth: int, of: bytes) -> bytes:
    """Return the header of an update whose map has one key, with ``depth`` nested values in it."""
    return raw_header("update", b"\x81\xa6values\x81\xa1a" + of * depth + b"\x01")


def _lists(depth: int) -> list[object]:
    return [_lists(depth - 1)] if depth > 1 else []


def _update(rest: dict[str, object] | None = None, **fixed: object) -> bytes:
    return raw_frame(raw_header("update", rest or {}, **fixed))


def _ack(rest: dict[str, object] | None = None, **fixed: object) -> bytes:
    return raw_frame(raw_header("ack", rest or {}, **fixed))


def _raw(kind: str, **fields: object) -> bytes:
    return raw_frame(raw_header(kind, fields))


def _sent_on(addresses: object) -> bytes:
    return _raw("refuse", error_type="E", error_text="no", x={"elsewhere": addresses})


def corpus() -> dict[str, bytes]:
    """Return every stream by its file name."""
    ack = encode_frame(Ack(1, 2, AckStatus.APPLIED))
    update = encode_frame(Update(1, 2, DIGEST), 70_000) + bytes(70_000)
    page = raw_header("page", {})
    list32 = b"\xdd\x00\x01\x00\x00"
    streams = {
        # These streams are legal.
        "ok-empty": b"",
        "ok-every-message": b"".join(encode_frame(message) for message in SAMPLES),
        "ok-payloads": (encode_frame(Update(1, 2, DIGEST), 5) + b"AIOS\x01") * 3 + ack,
        "ok-payload-larger-than-read-ahead": update + ack,
        "ok-header-larger-than-read-ahead": _update({"values": {"k": b"x" * 70_000}}) + ack,
        "ok-map-with-long-count": raw_frame(
            b"\x0e\xdf\x00\x00\x00\x02" + msgpack.packb({"epoch": 1, "version": 1})[1:]
        ),
        "ok-deepest-nesting": _update({"values": {"k": _lists(14)}}),
        # These streams end too early.
        "cut-in-magic": b"AI",
        "cut-in-prefix": ack[:23],
        "cut-before-header": ack[:24],
        "cut-in-header": ack[:-1],
        "cut-in-large-header": _update({"values": {"k": b"x" * 70_000}})[:-1],
        "cut-before-payload": update[:-70_000],
        "cut-in-payload": update[:-1],
        "cut-announces-much": raw_frame(b"", 2**17, header_nbytes=2**17, crc=0),
        # These streams have illegal prefixes.
        "fail-http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
        "fail-tls": bytes.fromhex("16030100c8010000c40303"),
        "fail-zeros": bytes(24),
        "fail-ones": b"\xff" * 24,
        "fail-pickle": b"\x80\x04\x95\x0f" + bytes(7) + b"\x8c\x02os\x94\x8c\x06system\x94",
        "fail-flags": raw_frame(page, flags=0x80),
        "fail-reserved": raw_frame(page, reserved=0x8000),
        "fail-no-header": raw_frame(b""),
        "fail-crc": ack[:-1] + bytes([ack[-1] ^ 1]),
        "fail-second-frame": ack + ack[1:],
        "fail-payload-without-announcement": ack + b"payload",
        "version-0": raw_frame(page, version=0),
        "version-1": _VERSION_1,
        "version-255": b"AIOS\xff",
        "large-header": raw_frame(b"", header_nbytes=2**17 + 1, crc=0),
        "large-header-4-gib": raw_frame(b"", header_nbytes=2**32 - 1, crc=0),
        "large-payload": raw_frame(b"\x80", 2**17 + 1),
        "large-payload-16-eib": raw_frame(b"\x80", 2**64 - 1),
        # These headers have illegal types or illegal fields in fixed places.
        "fail-type-0": raw_frame(b"\0"),
        "fail-type-unknown": raw_frame(b"\x12\x80"),
        "fail-type-only": raw_frame(b"\x01"),
        "fail-fixed-cut": raw_frame(raw_header("ack", {})[:-1]),
        "fail-fixed-trailing": raw_frame(raw_header("ack", {}) + b"\x80"),
        "fail-fixed-map-longer": _ack({"error_text": "x"}, nbytes=1000),
        "fail-fixed-map-shorter": _ack({"error_text": "x"}, nbytes=1),
        "fail-fixed-map-of-4-gib": _update(nbytes=2**32 - 1),
        "fail-update-flags": _update(flags=4),
        "fail-update-reserved": _update(reserved=1),
        "fail-ack-reserved": _ack(reserved=1),
        # These headers have no map, or an illegal one.
        "fail-header-nil": raw_frame(b"\x0e\xc0"),
        "fail-header-list": raw_frame(b"\x0e\x91\x80"),
        "fail-header-none": raw_frame(b"\x0e"),
        "fail-header-never-used": raw_frame(b"\x0e\xc1"),
        "fail-header-trailing": raw_frame(page + b"\xc0"),
        "fail-header-two-maps": raw_frame(page + b"\x80"),
        "fail-header-cut": raw_frame(raw_header("fetch", {"min_version": 0})[:-1]),
        "fail-key-number": raw_frame(b"\x08\x81\x01\x01"),
        "fail-key-list": raw_frame(b"\x08\x81\x91\x01\x01"),
        "fail-key-bytes": _update({"values": {b"a": 1}}),
        "fail-key-twice": raw_frame(b"\x09\x82\xa5epoch\x01\xa5epoch\x01"),
        "fail-key-twice-inside": raw_frame(
            raw_header("update", b"\x81\xa6values\x82\xa1k\x01\xa1k\x02")
        ),
        "fail-utf8": raw_frame(b"\x08\x81\xa1t\xa2\xc3\x28"),
        "fail-utf8-surrogate": raw_frame(b"\x08\x81\xa1t\xa3\xed\xa0\x80"),
        "fail-utf8-overlong": raw_frame(b"\x08\x81\xa1t\xa2\xc1\xa1"),
        "fail-ext-type": raw_frame(b"\x08\x81\xa1t\xd4\x2a\x00"),
        "fail-ext-timestamp": raw_frame(b"\x08\x81\xa1t\xd6\xff\x00\x00\x00\x00"),
        "fail-ext-empty": raw_frame(b"\x08\x81\xa1t\xc7\x00\x05"),
        "fail-unknown-field": _ack({"new": 1}),
        "fail-missing-field": _raw("current", epoch=1),
        # These headers try to use up memory or stack.
        "fail-list-of-4-gi": raw_frame(b"\x0f\x81\xa6values\xdd\xff\xff\xff\xff"),
        "fail-map-of-4-gi": raw_frame(b"\x0f\x81\xa6values\xdf\xff\xff\xff\xff"),
        "fail-bytes-of-4-gib": raw_frame(b"\x0f\x81\xa6values\xc6\xff\xff\xff\xff"),
        "fail-str-of-4-gib": raw_frame(b"\x0f\x81\xa6values\xdb\xff\xff\xff\xff"),
        "fail-nested-lists": raw_frame(_nested(16, b"\x91")),
        "fail-nested-maps": raw_frame(_nested(16, b"\x81\xa1k")),
        "fail-nested-lists-500": raw_frame(_nested(500, b"\x91")),
        "fail-nested-lists-100000": raw_frame(_nested(100_000, b"\x91")),
        "fail-nested-lists-that-lie": raw_frame(_nested(15, list32) + bytes(70_000)),
        "fail-nested-lists-that-lie-in-512-bytes": raw_frame(_nested(150, b"\xdc\x01\x80")),
        "fail-wide-lists-that-lie": raw_frame(_nested(1, list32 * 10) + bytes(70_000)),
        # These messages have illegal fields.
        "fail-few-has-a-list": _raw("fetch", min_version=[0]),
        "fail-few-has-many": _raw("fetch", **{f"k{i}": i for i in range(17)}),
        "fail-few-is-nested": _raw("fetch", x={"a": {"b": {}}}),
        "fail-epoch-0": _ack(epoch=0),
        "fail-epoch-too-large": _ack(epoch=2**63),
        "fail-epoch-true": _raw("current", epoch=True, version=1),
        "fail-epoch-float": _raw("current", epoch=1.0, version=1),
        "fail-version-negative": _raw("current", epoch=1, version=-1),
        "fail-version-0": _update(version=0),
        "fail-status-5": _ack(status=5),
        "fail-error-text-long": _ack({"error_text": "x" * 3073}, status=3),
        "fail-chunk": _update(index=5, count=5),
        "fail-chunk-of-none": _update(index=1),
        "fail-session-short": _raw("hello", role="r", model_id="", pid=1, session=b"x" * 15),
        "fail-partial-version-0": _raw("hello", role="r", model_id="", pid=1, partial_version=0),
        "fail-serves-unix": _raw("hello", role="r", model_id="", pid=1, x={"serves": "unix:///a"}),
        "fail-elsewhere-empty": _sent_on(""),
        "fail-elsewhere-number": _sent_on(1),
        "fail-elsewhere-unix": _sent_on("unix:///a"),
        "fail-elsewhere-long": _sent_on("tcp://" + "a" * 250),
        "fail-elsewhere-many": _sent_on(" ".join(["tcp://a:1"] * 9)),
        "fail-challenge-nonce-short": _raw("challenge", nonce=b"x" * 31),
        "fail-challenge-required-1": _raw("challenge", nonce=b"x" * 32, required=1),
        "fail-proof-without-mac": _raw("proof", nonce=b"x" * 32),
        "fail-proof-mac-long": _raw("proof", nonce=b"x" * 32, mac=b"x" * 65),
        "fail-fetch-negative": _raw("fetch", min_version=-1),
        "fail-current-epoch-0": _raw("current", epoch=0, version=1),
        "fail-status-list": _raw("status", values=[]),
        "fail-values-list": _update({"values": [1]}),
        "fail-ext-map-nested": _update({"x": {"a": {"b": 1}}}),
        "fail-ext-map-17": _update({"x": {str(i): i for i in range(17)}}),
        # These messages have illegal manifests, but for the last one.
        "fail-manifest-empty": _manifest(),
        "fail-manifest-version": _manifest([2, 0, 0]),
        "fail-manifest-count": _manifest([1, 64, 2**32], _leaf()),
        "fail-manifest-fewer-leaves": _manifest([1, 64, 2], _leaf()),
        "fail-manifest-more-leaves": _manifest([1, 64, 1], _leaf(), _leaf(name="b", offset=64)),
        "fail-manifest-overlap": _manifest([1, 64, 2], _leaf(), _leaf(name="b")),
        "fail-manifest-gap": _manifest([1, 192, 2], _leaf(), _leaf(name="b", offset=128)),
        "fail-manifest-unaligned": _manifest([1, 64, 1], _leaf(offset=4)),
        "fail-manifest-negative-offset": _manifest([1, 64, 1], _leaf(offset=-64)),
        "fail-manifest-overflow": _manifest([1, 64, 1], _leaf(shape=[2**63, 2, 2**63])),
        "fail-manifest-overflow-to-0": _manifest([1, 64, 1], _leaf(shape=[2**32, 2**32], nbytes=0)),
        "fail-manifest-empty-overflow": _manifest(
            [1, 0, 1], _leaf(shape=[0, 2**62, 2**62], nbytes=0)
        ),
        "fail-manifest-negative-size": _manifest([1, 64, 1], _leaf(shape=[-1, -2])),
        "fail-manifest-nbytes": _manifest([1, 64, 1], _leaf(nbytes=9)),
        "fail-manifest-dtype": _manifest([1, 64, 1], _leaf(dtype="object")),
        "fail-manifest-ndim": _manifest([1, 64, 1], _leaf(shape=[1] * 32 + [2])),
        "fail-manifest-name-twice": _manifest([1, 128, 2], _leaf(), _leaf(offset=64)),
        "fail-manifest-alias-twice": _manifest([1, 64, 1], _leaf(aliases=["a"])),
        "fail-manifest-name-nul": _manifest([1, 64, 1], _leaf(name="a\0b")),
        "fail-manifest-name-empty": _manifest([1, 64, 1], _leaf(name="")),
        "fail-manifest-name-long": _manifest([1, 64, 1], _leaf(name="n" * 1025)),
        "fail-manifest-name-nested": _raw(
            "manifest", manifest=msgpack.packb([1, 64, 1]) + b"\x97" + b"\x91" * 900 + b"\x01" * 7
        ),
        "fail-manifest-payload": _manifest(
            [1, 2**17 + 64, 1], _leaf(shape=[2**15 + 1], nbytes=2**17 + 4)
        ),
        "fail-manifest-lists-that-lie": _raw(
            "manifest", manifest=b"\x93\x01\x00\x01" + b"\xdc\x04\x00" * 20_000
        ),
        "fail-manifest-not-canonical": _raw("manifest", manifest=b"\x93\x01\xcc\x00\x00"),
        "ok-manifest": encode_frame(ManifestMessage(MANIFEST)),
    }
    # In these streams the header is legal, but the prefix announces another length.
    longer = bytearray(ack)
    struct.pack_into("<I", longer, 8, len(ack) - 24 + 1)
    streams["cut-header-length-plus-1"] = bytes(longer)
    struct.pack_into("<I", longer, 8, len(ack) - 24 - 1)
    streams["fail-header-length-minus-1"] = bytes(longer)
    return {f"{name}.bin": data for name, data in streams.items()}


def main() -> None:
    """Write a file for each stream, and remove the files of streams that are gone."""
    streams = corpus()
    CORPUS.mkdir(exist_ok=True)
    for path in CORPUS.glob("*.bin"):
        if path.name not in streams:
            path.unlink()
    for name, data in streams.items():
        (CORPUS / name).write_bytes(data)


if __name__ == "__main__":
    main()
