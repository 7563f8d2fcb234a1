"""Pages are short, their sentences too, each has a place, and shell commands are real ones."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import aiosync.cli
from tests.support.pages import DOCS, FENCE, PAGES, ROOT, name_of, shell_blocks, typed_lines
from tests.support.waiting import free_address, wait_until

MOST_WORDS = 1500
LONG_SENTENCE = 30
LONG_ONES = 0.03
TABLES_AND_RULES = {"docs/benchmarks.md", "docs/topics/wire-format.md"}
"""Pages to look things up in, which may have any number of words."""


# -- words and sentences ---------------------------------------------------------------------------


def _prose(text: str) -> str:
    text = FENCE.sub("\n\n", text)
    return re.sub(r"<!--.*?-->|\[(.*?)\]\([^)]*\)", r"\1", text, flags=re.DOTALL)


def _words(text: str) -> int:
    """Outside of code: those of paragraphs, lists, tables and headings."""
    return len(re.findall(r"\w[\w'\u2019.()=*-]*", _prose(text)))


def _sentences(text: str) -> list[str]:
    """Those of paragraphs and lists."""
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
    """The pages in the toctrees of a page."""
    for _, language, text in FENCE.findall(page.read_text()):
        if language.strip() != "{toctree}":
            continue
        for line in text.splitlines():
            entry = line.strip()
            if not entry or entry.startswith(":"):
                continue
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


# -- shell commands --------------------------------------------------------------------------------


def _commands(text: str) -> Iterator[list[str]]:
    """The simple commands of a block, as lists of words."""
    for typed in typed_lines(text):
        lexer = shlex.shlex(typed, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        words: list[str] = []
        for word in lexer:
            if set(word) <= set("();<>|&"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)
        if words:
            yield words


def _without_python(words: list[str]) -> list[str]:
    """The command itself: without variables, and with `python -m aiosync` as `aiosync`."""
    while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
        words = words[1:]
    if not words:
        return []
    program = Path(words[0]).name
    if re.fullmatch(r"python3?(\.\d+)?", program):
        rest = [word for word in words[1:] if word != "-u"]
        if rest[:2] == ["-m", "aiosync"]:
            return rest[1:]
        return ["python", *rest]
    return [program, *words[1:]]


def _options(words: list[str]) -> list[str]:
    found = [word.partition("=")[0] for word in words if re.match(r"--?[A-Za-z]", word)]
    return [each for each in found if each != "--help"]


def _source_of(module: str) -> Path | None:
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return None
    origin = Path(spec.origin)
    return origin.with_name("__main__.py") if origin.name == "__init__.py" else origin


def _unparsed(words: list[str], source: Path) -> list[str]:
    """Options that stand nowhere in the source of a program, in quotes."""
    quoted = set(re.findall(r'"(?:--)?([\w-]+)"', source.read_text()))
    return [each for each in _options(words) if each.removeprefix("--") not in quoted]


def _faults(words: list[str], help_of: Callable[[str], str]) -> list[str]:
    """What a command has that does not exist."""
    words = _without_python(words)
    match words:
        case ["aiosync", command, *rest] if not command.startswith("-"):
            if not re.search(rf"│ {command} ", help_of("")):
                return [f"aiosync {command}"]
            there = help_of(command)
            return [each for each in _options(rest) if not re.search(rf"(?<!\S){each}\b", there)]
        case ["aiosync", *rest]:
            return [each for each in _options(rest) if each not in help_of("")]
        case ["python", "-m", module, *rest] if module.split(".")[0] == "tests":
            source = _source_of(module)
            if source is None:
                return [module]
            return _unparsed(rest, source)
        case ["python", file, *rest] if file.startswith("examples/"):
            if not (ROOT / file).exists():
                return [file]
            return _unparsed(rest, ROOT / file)
        case ["pip", "install", *rest]:
            return [fault for word in rest for fault in _faults_of_requirement(word)]
    return []


def _faults_of_requirement(word: str) -> list[str]:
    """Extras that do not exist, and aiosync from an index: it is on none."""
    match = re.fullmatch(r"(\.|aiosync)(?:\[(.*)\])?(?:[=<>~].*)?", word)
    if match is None:
        return []
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = (match[2] or "").split(",") if match[2] else []
    faults = [extra for extra in asked if extra.strip() not in project["optional-dependencies"]]
    return [*faults, *([word] if match[1] != "." else [])]


@pytest.fixture
def help_of(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[[str], str]:
    """The help of a command, or with "" that of all of them, in one line for each option."""
    monkeypatch.setenv("COLUMNS", "250")
    known: dict[str, str] = {}

    def ask(command: str) -> str:
        if command not in known:
            capsys.readouterr()
            assert aiosync.cli.main([*command.split(), "--help"]) == 0
            known[command] = re.sub(r"\x1b\[[\d;]*m", "", capsys.readouterr().out)
        return known[command]

    return ask


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_shell_commands_and_their_options_exist(page: Path, help_of: Callable[[str], str]) -> None:
    faults = [
        f"{' '.join(words)}: {fault}"
        for text in shell_blocks(page)
        for words in _commands(text)
        for fault in _faults(words, help_of)
    ]
    assert faults == []


@pytest.mark.parametrize(
    ("typed", "faults"),
    [
        ("aiosync push policy.pt tcp://host:1 --token-file token  # --nothing", []),
        ("aiosync push policy.pt tcp://host:1 --token-fil token", ["--token-fil"]),
        ("X=1 .venv/bin/aiosync pish a b && aiosync status --jso", ["aiosync pish", "--jso"]),
        ("python -m aiosync top --html 127.0.0.1:1 --nothing=1", ["--nothing"]),
        ("(umask 077; aiosync --version --nothing) > token", ["--nothing"]),
        ("python -m tests.bench --profile full --nothing", ["--nothing"]),
        ("python -m tests.bench.nothing", ["tests.bench.nothing"]),
        ("python examples/two_machines.py work URL token --nothing", ["--nothing"]),
        ("python examples/nothing.py", ["examples/nothing.py"]),
        (
            ".venv/bin/pip install torch -e '.[cli,nothing]' 'aiosync[cli]'",
            ["nothing", "aiosync[cli]"],
        ),
        ("$ aiosync push \\\n    a --nothing\nsaid --something else", ["--nothing"]),
        ("python -c 'print(1)\nprint(2)'\naiosync nothing", ["aiosync nothing"]),
    ],
)
def test_a_wrong_command_is_found(
    typed: str, faults: list[str], help_of: Callable[[str], str]
) -> None:
    assert [fault for words in _commands(typed) for fault in _faults(words, help_of)] == faults


# -- the tutorial ----------------------------------------------------------------------------------


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(200)
def test_the_two_programs_of_the_quickstart_find_each_other(tmp_path: Path) -> None:
    blocks = FENCE.findall((DOCS / "quickstart.md").read_text())
    train, act = [text for _, language, text in blocks if language.strip() == "python"][:2]
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
