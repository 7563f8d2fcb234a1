"""What other libraries need so that aiosync works with them; loaded when they are in use."""

from __future__ import annotations

__all__: list[str] = []
