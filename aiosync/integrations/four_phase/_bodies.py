"""Bodies of requests: their size, their JSON, and the names and types of their fields."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Final, TypeAlias

__all__ = [
    "INIT_FIELDS",
    "MAX_TEXT",
    "MAX_WAIT_SECONDS",
    "UPDATE_FIELDS",
    "Body",
    "Disconnected",
    "Refused",
    "fields_of",
    "receive_body",
    "text_of",
]

Body: TypeAlias = dict[str, Any]
"""A JSON object."""

_MAX_BODY_NBYTES: Final = 65536

MAX_TEXT: Final = 2048
"""Most characters of a text in a body, and of an error in an answer."""

MAX_WAIT_SECONDS: Final = 600.0
"""Longest wait that a body may ask for."""

_TEXT, _FLAG = (str,), (bool,)

INIT_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "address": _TEXT,
    "model_id": _TEXT,
    "first_worker": (int,),
    "timeout": (int, float),
    "token_file": (str, type(None)),
    "tls": (dict, type(None)),
    "check": _TEXT,
    "rollback": _FLAG,
}
"""Fields of :class:`aiosync.integrations.vllm.AiosyncInitInfo`."""

UPDATE_FIELDS: Final[Mapping[str, tuple[type, ...]]] = {
    "version": (int,),
    "timeout": (int, float),
    "undo": _FLAG,
}
"""Fields of :class:`aiosync.integrations.vllm.AiosyncUpdateInfo`."""


class Refused(Exception):
    """A request that is answered with a status other than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Disconnected(Exception):
    """The client has gone before its request was complete."""


async def receive_body(receive: Any) -> Body:
    """Receive a JSON object of bounded size; nothing counts as an empty one."""
    data = await _receive_bytes(receive)
    try:
        body = json.loads(data) if data else {}
    except (ValueError, RecursionError) as exc:
        raise Refused(400, f"the body is not JSON: {exc}") from exc
    if body is None:
        return {}
    if not isinstance(body, dict):
        raise Refused(400, "the body must be a JSON object")
    return body


async def _receive_bytes(receive: Any) -> bytearray:
    """Receive a body of bounded size, as it is."""
    data, more = bytearray(), True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise Disconnected
        data += message.get("body") or b""
        more = message.get("more_body", False)
        if len(data) > _MAX_BODY_NBYTES:
            raise Refused(413, f"the body has more than {_MAX_BODY_NBYTES} bytes")
    return data


def fields_of(
    given: Any, what: str, known: Mapping[str, tuple[type, ...]], *, needed: str
) -> dict[str, Any]:
    """Return the fields of an object in a body, each of a known name and type.

    Args:
        given: The object, as it came.
        what: Name of the object, for errors.
        known: The types that each field may have.
        needed: Name of the field that must not be missing.

    Raises:
        Refused: The object is missing, or has another field or type.
    """
    if not isinstance(given, dict) or needed not in given:
        raise Refused(400, f"{what} must be an object that has {needed!r}")
    for name, value in given.items():
        if name not in known:
            raise Refused(400, f"{what} has no field {name[:MAX_TEXT]!r}")
        if not _fits(value, known[name]):
            raise Refused(400, f"{what}: {name} has an illegal value")
        if name == "timeout" and not 0 < value <= MAX_WAIT_SECONDS:  # NaN is not, either
            limit = f"above 0, and at most {MAX_WAIT_SECONDS:g} s"
            raise Refused(400, f"{what}: timeout must be {limit}")
    return dict(given)


def _fits(value: object, types: tuple[type, ...]) -> bool:
    """Return True if the value of a field has one of these types, and is not too long."""
    if isinstance(value, str) and len(value) > MAX_TEXT:
        return False
    # In Python a bool is an int, too, but here it fits a flag only.
    return isinstance(value, types) and isinstance(value, bool) == (types == _FLAG)


def text_of(body: Body, name: str, *, optional: bool = False) -> str | None:
    """Return the text of a field of a body; ``None`` if it is missing and ``optional``.

    Raises:
        Refused: The field is missing, no text or too long.
    """
    value = body.get(name)
    if (value is None and optional) or (isinstance(value, str) and len(value) <= MAX_TEXT):
        return value
    raise Refused(400, f"{name} must be a text of at most {MAX_TEXT} characters")
