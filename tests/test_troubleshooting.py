"""Messages that the page Troubleshooting quotes: each is a message that the package has."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "topics" / "troubleshooting.md"
# asyncio, the C library and OpenSSL say these.
FOREIGN = re.compile(
    "Connect call failed|Name or service not known|unable to get local issuer certificate"
    "|Hostname mismatch, certificate is not valid for|TLSV13_ALERT_CERTIFICATE_REQUIRED"
)
VARIES = re.compile(r"\.\.\.|'[^']*'|\b\d+\b|^\w+: |\b\w+Error: ")


def _texts(node: ast.AST) -> str:
    """Return every string below a node, one a line, without the values that are filled in."""
    found = []
    for each in ast.walk(node):
        if isinstance(each, ast.JoinedStr):
            parts = (part.value if isinstance(part, ast.Constant) else "" for part in each.values)
            found.append("\0".join(map(str, parts)))
        elif isinstance(each, ast.Constant) and isinstance(each.value, str):
            found.append(each.value)
    return "\n".join(found)


SOURCES = [path.read_text() for path in (ROOT / "aiosync").rglob("*.py")]
SAID = re.sub("\0+", "\0", "\n".join(_texts(ast.parse(text)) for text in SOURCES))


def _quoted() -> list[str]:
    tables = re.findall(r"^\| message \|.*\n(?:\|.*\n)+", PAGE.read_text(), re.MULTILINE)
    rows = [row for table in tables for row in table.splitlines()[2:]]
    return [text for row in rows for text in re.findall("`([^`]+)`", row.split(" | ")[0])]


def _unknown(message: str) -> list[str]:
    """Return the parts of a message, of two words or more, that no text of the package has."""
    parts = VARIES.split(FOREIGN.sub("...", message))
    phrases = [part.strip(" :;,") for part in parts]
    return [phrase for phrase in phrases if " " in phrase and phrase not in SAID]


def test_there_is_something_to_check() -> None:
    assert len(_quoted()) >= 25


@pytest.mark.parametrize("message", _quoted())
def test_a_quoted_message_is_one_of_the_package(message: str) -> None:
    assert _unknown(message) == []


def test_a_message_that_nobody_says_is_found() -> None:
    assert _unknown("the moon did not answer within 3 s") == ["the moon did not answer within"]
