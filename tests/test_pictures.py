"""Pictures of the pages: their files are what their script draws, and they can be read."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[1] / "docs"
SCRIPT: dict[str, Any] = runpy.run_path(str(DOCS / "pictures.py"))


def test_the_files_are_what_the_script_draws() -> None:
    on_disk = {path.name: path.read_text() for path in (DOCS / "pictures").glob("*.svg")}
    assert on_disk == SCRIPT["files"](), "run: python docs/pictures.py"


def test_a_line_that_does_not_fit_is_refused() -> None:
    picture = SCRIPT["Picture"](SCRIPT["LIGHT"], 100)
    picture.box(0, 0, 100, 40, "worker", "short")
    with pytest.raises(ValueError, match="does not fit"):
        picture.box(0, 0, 100, 40, "worker", "much longer than that")


def _luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def _contrast(one: str, other: str) -> float:
    low, high = sorted([_luminance(one), _luminance(other)])
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("palette", ["LIGHT", "DARK"])
def test_text_and_lines_stand_out(palette: str) -> None:
    """By WCAG 2, text in its box has a contrast of at least 7, and a line on the page one of 3."""
    colours = SCRIPT[palette]
    page = colours["page"][0]
    text = {role: _contrast(fill, ink) for role, (fill, _, ink) in colours.items()}
    lines = {role: _contrast(page, frame) for role, (_, frame, _) in colours.items()}
    assert min(text.values()) >= 7, text
    assert min(lines.values()) >= 3, lines
