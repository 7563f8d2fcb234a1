"""Code in README and docs: it compiles, its names exist, and complete programs run."""

from __future__ import annotations

import ast
import importlib
import inspect
import os
import re
import subprocess
import sys
import tomllib
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import aiosync
from tests.api import snapshot
from tests.support.pages import PAGES, ROOT, Block, blocks, name_of

# A trainer draws its epoch at random, so each run prints another one.
EPOCH = re.compile(r"\b[0-9a-f]{16}\b")


BLOCKS = [block for page in PAGES for block in blocks(page)]
PYTHON = [block for block in BLOCKS if block.language == "python"]
# A block with one of these texts is a complete program, meant to run as a file.
WHOLE = ('__name__ == "__main__"', "\naiosync.run(")
PROGRAMS = [block for block in PYTHON if any(each in block.text for each in WHOLE)]
TOP_LEVEL_AWAIT = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT


def _unknown_names(source: str) -> list[str]:
    """Return the dotted names below aiosync that a source uses and the package lacks."""
    names = set()
    for node in ast.walk(compile(source, "<docs>", "exec", TOP_LEVEL_AWAIT)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("aiosync"):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Import):
            names |= {item.name for item in node.names if item.name.startswith("aiosync")}
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            if re.fullmatch(r"aiosync(\.\w+)+", text):
                names.add(text)
    return sorted(name for name in names if not _exists(name))


def _exists(name: str) -> bool:
    value: object = aiosync
    path = "aiosync"
    for part in name.split(".")[1:]:
        path += f".{part}"
        if not hasattr(value, part):
            try:
                importlib.import_module(path)
            except ModuleNotFoundError:
                # An integration whose framework is not here has its promises in a file.
                promised = snapshot.FOLDER / f"{path}.txt"
                text = promised.read_text() if snapshot.lacks_framework(path) else ""
                return f"class {name.rpartition('.')[2]}(" in text
        value = getattr(value, part)
    return True


def _unknown_methods(source: str) -> list[str]:
    """Return the attributes of ``scheme`` in a source that no scheme has, sync or async."""
    sync = importlib.import_module("aiosync.sync")
    names = ("SharedMemWeightSyncScheme", "TCPWeightSyncScheme")
    known = {
        each for name in names for side in (aiosync, sync) for each in dir(getattr(side, name))
    }
    used = {
        node.attr
        for node in ast.walk(compile(source, "<docs>", "exec", TOP_LEVEL_AWAIT))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "scheme"
    }
    return sorted(used - known)


def test_there_is_something_to_check() -> None:
    assert len(PYTHON) >= 10
    assert len(PROGRAMS) >= 3
    assert len([program for program in PROGRAMS if program.shown]) >= 8


@pytest.mark.parametrize("block", PYTHON, ids=str)
def test_code_compiles_and_its_names_exist(block: Block) -> None:
    assert _unknown_names(block.text) == []
    assert _unknown_methods(block.text) == []


@pytest.mark.parametrize(
    "source", ["from aiosync import Nothing", "import aiosync.nothing", "aiosync.sync.nothing()"]
)
def test_an_unknown_name_is_found(source: str) -> None:
    assert _unknown_names(source) != []


def test_an_unknown_method_is_found() -> None:
    assert _unknown_methods("await scheme.send()\nscheme.nothing()") == ["nothing"]


def _run(block: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    file = folder / f"{block.page.stem}_{block.line}.py"
    file.write_text(block.text)
    return subprocess.run(
        [sys.executable, "-W", "error::ResourceWarning", str(file)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )


@pytest.fixture(scope="module")
def done(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, subprocess.CompletedProcess[str]]:
    """Run the programs of the chosen tests, two at a time on two cores; return how each ended."""
    calls = [getattr(item, "callspec", None) for item in request.session.items]
    wanted = {str(call.params["program"]) for call in calls if call and "program" in call.params}
    folder = tmp_path_factory.mktemp("programs")
    programs = [block for block in PROGRAMS if str(block) in wanted]
    with ThreadPoolExecutor(2) as pool:
        ended = pool.map(lambda block: _run(block, folder), programs)
        return dict(zip(map(str, programs), ended, strict=True))


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_complete_programs_run(
    program: Block, done: dict[str, subprocess.CompletedProcess[str]]
) -> None:
    ended = done[str(program)]
    assert (ended.returncode, ended.stderr) == (0, ""), ended.stdout + ended.stderr
    if program.shown is not None:
        assert EPOCH.sub("EPOCH", ended.stdout) == EPOCH.sub("EPOCH", program.shown)


def test_the_readme_has_the_two_commands_and_ci_runs_the_second() -> None:
    commands = [
        block.text.strip()
        for block in BLOCKS
        if block.page.name == "README.md" and block.language == "console"
    ]
    assert len(commands) == 2
    job, tests = commands
    assert job.endswith("aiosync demo")
    assert tests.endswith("pytest")
    assert tests in (ROOT / ".ci" / "run").read_text()


def test_the_torch_that_the_pages_name_is_the_pinned_one() -> None:
    """The commands name the pinned torch, as old pips otherwise download the newest wheel first."""
    pins = re.findall(r'"(torch==\S+)"', (ROOT / "pyproject.toml").read_text())
    named = [
        re.findall(r"torch==\S+", block.text)
        for block in BLOCKS
        if block.language == "console" and "pip install" in block.text
    ]
    assert len(pins) == 1
    assert len(named) >= 3
    assert all(versions == pins for versions in named)


def test_a_page_installs_an_extra_from_a_checkout_and_from_an_index() -> None:
    """Only a checkout can run the tests, so their extra is left out."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    texts = {name_of(page): page.read_text() for page in PAGES}
    from_checkout, from_index = (
        {(page, extra) for page, text in texts.items() for extra in re.findall(pattern, text)}
        for pattern in (r"'\.\[([\w,-]+)\]'", r"'aiosync\[([\w,-]+)\]'")
    )
    assert len(from_checkout) >= 10
    assert {each for each in from_checkout - from_index if each[1] != "test"} == set()
    named = {extra for _, extras in from_checkout | from_index for extra in extras.split(",")}
    assert named <= set(project["optional-dependencies"])


def test_the_citation_names_this_release() -> None:
    page = (ROOT / "docs" / "citing.md").read_text()
    assert f"version = {{{aiosync.__version__}}}" in page


def test_links_between_pages_lead_somewhere() -> None:
    broken = [
        f"{page.relative_to(ROOT)}: {target}"
        for page in PAGES
        for target in re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert broken == []


def test_examples_that_are_named_exist() -> None:
    named = {
        f"{page.relative_to(ROOT)}: {name}"
        for page in PAGES
        for name in re.findall(r"\bexamples/\w+\.py\b", page.read_text())
        if not (ROOT / name).exists()
    }
    assert named == set()


def test_every_exception_is_in_the_drawn_tree() -> None:
    errors = importlib.import_module("aiosync.errors")
    drawn = set(re.findall(r"\w+", inspect.getdoc(errors) or ""))
    assert set(errors.__all__) - drawn == set()


def test_ci_builds_the_documentation() -> None:
    command = 'sphinx-build" -W --keep-going -q -b html docs'
    assert command in (ROOT / ".ci" / "run").read_text()
