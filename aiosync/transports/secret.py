"""Secrets that neither a repr nor the text of a pickle shows. Must not import torch."""

from __future__ import annotations

import hmac
import secrets
from typing import Any

from aiosync.errors import ConfigError

__all__ = ["MAKE_A_TOKEN", "Secret"]

MAKE_A_TOKEN = "make one with `python -c 'import secrets; print(secrets.token_urlsafe())'`"


class Secret:
    """Secret bytes that neither a repr nor the text of a pickle shows.

    A pickle carries the bytes masked. This keeps them out of logs, but not from a reader who has
    the pickle.

    Args:
        value: The secret; text becomes UTF-8. The attribute has the bytes.

    Raises:
        ConfigError: The secret is empty, or neither text nor bytes.
    """

    __slots__ = ("value",)

    def __init__(self, value: str | bytes) -> None:
        data = value.encode() if isinstance(value, str) else value
        if not isinstance(data, bytes):
            raise ConfigError(f"a token must be str or bytes, not {type(value).__name__}")
        if not data:
            raise ConfigError(f"the token is empty: {MAKE_A_TOKEN}")
        self.value: bytes = data

    def __repr__(self) -> str:
        return "<secret>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Secret) and hmac.compare_digest(self.value, other.value)

    def __hash__(self) -> int:
        return hash(self.value)

    def __reduce__(self) -> tuple[Any, ...]:
        mask = secrets.token_bytes(len(self.value))
        return (_unmask, (mask, bytes(a ^ b for a, b in zip(mask, self.value, strict=True))))


def _unmask(mask: bytes, masked: bytes) -> Secret:
    return Secret(bytes(a ^ b for a, b in zip(mask, masked, strict=True)))
