"""Integrations that let other libraries work with aiosync; each is loaded when it is in use."""

from __future__ import annotations

__all__: list[str] = []
