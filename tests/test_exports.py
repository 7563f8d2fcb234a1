"""Exports of the promised modules: complete, in order, and with a docstring for each name."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
from pathlib import Path

import pytest

from tests.api import snapshot

PARAMS = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            snapshot.lacks_framework(name), reason="its framework is not installed"
        ),
    )
    for name in snapshot.MODULES
]


def _order(name: str) -> tuple[int, str]:
    """Return a sort key: constants, then classes, then the rest, the order of ruff's RUF022."""
    if name.isupper() and len(name) > 1:
        return 0, name
    return (1 if name[0].isupper() else 2), name


def _source(module: str) -> str:
    path = importlib.import_module(module).__file__
    assert path is not None
    return Path(path).read_text()


def _documented_assignments(source: str) -> set[str]:
    """Return the names of module-level assignments that a string literal follows."""
    body = ast.parse(source).body
    found = set()
    for node, following in itertools.pairwise(body):
        is_text = (
            isinstance(following, ast.Expr)
            and isinstance(following.value, ast.Constant)
            and isinstance(following.value.value, str)
        )
        if is_text and isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return found


def _defined_in_source(source: str) -> set[str]:
    """Return the public names that a module defines itself; imports do not count."""
    found = set()
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {target.id for target in targets if isinstance(target, ast.Name)}
    return {name for name in found if not name.startswith("_")}


@pytest.mark.parametrize("name", PARAMS)
def test_all_is_there_complete_and_sorted(name: str) -> None:
    module = importlib.import_module(name)
    exported = getattr(module, "__all__", None)
    assert exported is not None, f"{name} has no __all__"
    assert list(exported) == sorted(set(exported), key=_order)
    assert [item for item in exported if not hasattr(module, item)] == []
    assert _defined_in_source(_source(name)) - set(exported) == set()


@pytest.mark.parametrize("name", PARAMS)
def test_every_public_name_has_a_docstring(name: str) -> None:
    module = importlib.import_module(name)
    assert module.__doc__, f"{name} has no docstring"
    source = _source(name)
    own = _defined_in_source(source)
    documented = _documented_assignments(source)
    bare = []
    for item in module.__all__:
        value = getattr(module, item)
        if inspect.isclass(value) or inspect.isfunction(value):
            if not inspect.getdoc(value):
                bare.append(item)
        elif item in own and item not in documented:
            bare.append(item)
    assert bare == [], f"{name}: no docstring for {bare}"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('A = 1\n"""Doc."""\n', {"A"}),
        ('A: int = 1\n"""Doc."""\nB = 2\n', {"A"}),
        ("A = 1\n", set()),
    ],
)
def test_an_undocumented_constant_is_found(source: str, expected: set[str]) -> None:
    assert _documented_assignments(source) == expected


def test_the_order_of_names() -> None:
    assert sorted(["run", "Scheme", "WIRE_VERSION", "AckStatus"], key=_order) == [
        "WIRE_VERSION",
        "AckStatus",
        "Scheme",
        "run",
    ]
