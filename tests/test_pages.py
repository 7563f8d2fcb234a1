"""Pages: their length, their sentences, their place in a toctree, the programs of the tutorial."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.pages import (
    DOCS,
    FENCE,
    PAGES,
    ROOT,
    blocks,
    name_of,
    shell_blocks,
    typed_lines,
)
from tests.support.waiting import free_address, wait_until

MOST_WORDS = 1500
LONG_SENTENCE = 30
LONG_ONES = 0.03
TABLES_AND_RULES = {"docs/benchmarks.md", "docs/topics/wire-format.md"}
"""Reference pages, which may have any number of words."""


# -- words and sentences ---------------------------------------------------------------------------


def _prose(text: str) -> str:
    text = FENCE.sub("\n\n", text)
    return re.sub(r"<!--.*?-->|\[(.*?)\]\([^)]*\)", r"\1", text, flags=re.DOTALL)


def _words(text: str) -> int:
    """Return the number of words outside of code: in paragraphs, lists, tables and headings."""
    return len(re.findall(r"\w[\w'\u2019.()=*-]*", _prose(text)))


def _sentences(text: str) -> list[str]:
    """Return the sentences of paragraphs and lists."""
    found = []
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*|#>]|\d+\.)\s?)", _prose(text)):
        block = " ".join(block.split())
        if block and block[0] not in "|#":
            found += re.split(r"(?<=[.!?])[)\"*_`]*\s+(?=[^a-z])", block)
    return [each for each in found if re.search(r"\w", each)]


def _long_sentences(text: str) -> list[str]:
    return [each for each in _sentences(text) if len(each.split()) > LONG_SENTENCE]


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_a_page_has_few_words_and_short_sentences(page: Path) -> None:
    text = page.read_text()
    assert _words(text) <= MOST_WORDS or name_of(page) in TABLES_AND_RULES
    long = _long_sentences(text)
    assert len(long) <= LONG_ONES * len(_sentences(text)), "\n".join(long)


def test_long_sentences_and_many_words_are_found() -> None:
    text = (
        "# Title\n\nShort. Some " + "words " * 30 + "end. Short again.\n\n- One.\n- Two (2.5 s).\n"
    )
    assert [len(each.split()) for each in _long_sentences(text)] == [32]
    assert len(_sentences(text)) == 5
    assert _words("| a | b |\n|---|---|\n| one two | three |\n\n```python\nnot = these\n```\n") == 5


def test_readme_and_changelog_fit_a_screen_or_two() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    assert len((DOCS / "changelog.md").read_text().splitlines()) <= 60


# -- a place for each page -------------------------------------------------------------------------


def _listed(page: Path) -> Iterator[Path]:
    """Yield the pages in the toctrees of a page."""
    toctrees = [block.text for block in blocks(page) if block.language == "{toctree}"]
    for entry in map(str.strip, "\n".join(toctrees).splitlines()):
        if entry and not entry.startswith(":"):
            titled = re.fullmatch(r".*<(.+)>", entry)
            target = (titled[1] if titled else entry).removesuffix(".md")
            if "://" not in target:
                base = DOCS if target.startswith("/") else page.parent
                yield (base / f"{target.lstrip('/')}.md").resolve()


def test_every_page_stands_in_a_toctree() -> None:
    found, new = set[Path](), {DOCS / "index.md"}
    while new:
        found |= new
        new = {each for page in new for each in _listed(page)} - found
    assert found == set(PAGES[1:])


# -- shell commands that test_shell_blocks.py does not run -----------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("command", ["aiosync bench", "python -m tests.bench"])
def test_options_of_commands_that_take_minutes_exist(command: str) -> None:
    lines = [line for page in PAGES for text in shell_blocks(page) for line in typed_lines(text)]
    typed = "\n".join(line.partition("#")[0] for line in lines if f"{command} " in line)
    options = set(re.findall(r"(?<=\s)--[\w-]+", typed))
    assert len(options) >= 3
    words = command.replace("aiosync", "python -m aiosync").split()[1:]
    helped = subprocess.check_output(
        [sys.executable, *words, "--help"], text=True, env={**os.environ, "COLUMNS": "250"}
    )
    # PY_COLORS, whatever its value, makes the program colour its help.
    helped = re.sub(r"\x1b\[[\d;]*m", "", helped)
    assert [option for option in options if not re.search(rf"{option}\b", helped)] == []


# -- the tutorial ----------------------------------------------------------------------------------


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_two_programs_of_the_quickstart_find_each_other(tmp_path: Path) -> None:
    programs = [each.text for each in blocks(DOCS / "quickstart.md") if each.language == "python"]
    train, act = programs[:2]
    assert "init_on_sender" in train
    assert "init_on_receiver" in act
    address, started = free_address(), list[subprocess.Popen[bytes]]()

    def start(name: str, program: str) -> Callable[[], str]:
        file, out = tmp_path / f"{name}.py", tmp_path / f"{name}.txt"
        file.write_text(program.replace("tcp://127.0.0.1:7000", address))
        with out.open("wb") as stream:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-u", file],
                    stdout=stream,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, "PYTHONPATH": str(ROOT)},
                )
            )
        return out.read_text

    def newest(text: str) -> int:
        return max(map(int, re.findall(r"^version (\d+):", text, re.MULTILINE)), default=0)

    try:
        trainer, worker = start("train", train), start("act", act)
        wait_until(lambda: newest(worker()) >= 3)
        told = re.compile(r"^loss \d.*workers \[0\] have version \d+$", re.MULTILINE)
        wait_until(lambda: told.search(trainer()) is not None)
        started[1].send_signal(signal.SIGINT)
        started[1].wait(30)
        left_at = newest(worker())
        again = start("again", act)
        wait_until(lambda: newest(again()) > left_at)
        assert newest(again().partition("\n")[0]) >= left_at
        assert started[0].poll() is None
        started[2].kill()
        started[0].wait(30)
        assert "PartialSyncError" in trainer()
    finally:
        for process in started:
            process.kill()
            process.wait()
