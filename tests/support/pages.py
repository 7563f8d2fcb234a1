"""The pages of the documentation, their blocks of code, and the lines that a reader types."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
# The built site is left out, because it has a copy of each page.
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts),
]
FENCE = re.compile(
    r"^ *(`{3,}|:{3,}|~{3,})(.*?)\n(.*?)^ *\1 *$(?=(?:\n\n```text\n(.*?)^```$)?)",
    re.MULTILINE | re.DOTALL,
)
SHELLS = {"bash", "console", "sh", "shell"}


def name_of(page: Path) -> str:
    """Return the path of a page in the checkout."""
    return str(page.relative_to(ROOT))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page."""

    page: Path
    line: int
    language: str
    text: str
    shown: str | None = None
    """The output that the page shows right below the block."""

    def __str__(self) -> str:
        return f"{name_of(self.page)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    return [
        Block(page, text.count("\n", 0, each.start()) + 1, each[2].strip(), each[3], each[4])
        for each in FENCE.finditer(text)
    ]


def shell_blocks(page: Path) -> list[str]:
    """Return the texts of a page's shell blocks, in order."""
    return [block.text for block in blocks(page) if block.language in SHELLS]


def typed_lines(text: str) -> Iterator[str]:
    """Yield the commands that a reader types: the lines after prompts, or all without prompts."""
    prompts = re.findall(r"^ *[$%] ((?:.*\\\n)*.*)", text, re.MULTILINE)
    lines = "\n".join(prompts) if prompts else text
    typed = ""
    for line in lines.replace("\\\n", " ").splitlines():
        typed = f"{typed}\n{line}" if typed else line
        if not typed.strip() or typed.lstrip().startswith("#"):
            typed = ""
        elif _is_whole(typed):
            yield typed
            typed = ""
    assert not typed, f"no shell would understand {typed!r}"


def _is_whole(typed: str) -> bool:
    try:
        shlex.split(typed, comments=True)
    except ValueError:
        # A quotation is still open.
        return False
    return True
