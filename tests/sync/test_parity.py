"""Parity of the facade and the async classes: names, parameters, defaults and documentation."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

import aiosync
import aiosync.sync

CLASSES = [
    "DistributedWeightSyncScheme",
    "MultiProcessWeightSyncScheme",
    "NoWeightSyncScheme",
    "RPCWeightSyncScheme",
    "RayModuleTransformScheme",
    "RayWeightSyncScheme",
    "SharedMemWeightSyncScheme",
    "TCPWeightSyncScheme",
    "WeightSyncScheme",
]

OTHER_NAMES = {"aclose": "shutdown", "send_nowait": "send_async"}
"""Async names, and the blocking names that differ from them."""

ONLY_BLOCKING = {"wait_async"}
"""Blocking names without a twin: ``wait_async()`` stands for awaiting the handle."""


def _public(cls: type) -> dict[str, Any]:
    return {name: getattr(cls, name) for name in dir(cls) if not name.startswith("_")}


def _options(cls: str = "SharedMemWeightSyncScheme") -> set[str]:
    """Return the public attributes of an instance of a class."""
    # WeightSyncScheme is abstract, so another class gives the options of the base class.
    if cls == "WeightSyncScheme":
        cls = "MultiProcessWeightSyncScheme"  # it has no options of its own
    return {name for name in vars(getattr(aiosync, cls)()) if name[0] != "_"}


def test_the_class_names_are_the_same() -> None:
    schemes = {name for name in aiosync.__all__ if name.endswith("Scheme")}
    # TorchRL exports these names beside its schemes.
    others = {"InitialSyncTransport", "WeightStrategy", "WeightSyncBackend"}
    others |= {"connect_all", "twin"}
    assert set(aiosync.sync.__all__) - others == schemes == set(CLASSES)
    assert aiosync.sync.WeightStrategy is aiosync.WeightStrategy


@pytest.mark.parametrize("name", CLASSES)
def test_inheritance_and_constructors_are_the_same(name: str) -> None:
    original, twin = getattr(aiosync, name), getattr(aiosync.sync, name)
    assert issubclass(twin, aiosync.sync.WeightSyncScheme)
    assert inspect.signature(twin) == inspect.signature(original)


def test_the_base_class_is_abstract_as_well() -> None:
    for module in (aiosync, aiosync.sync):
        with pytest.raises(TypeError, match="abstract"):
            module.WeightSyncScheme()


@pytest.mark.parametrize("name", CLASSES)
def test_every_public_name_has_a_twin(name: str) -> None:
    original, twin = _public(getattr(aiosync, name)), _public(getattr(aiosync.sync, name))
    expected = {OTHER_NAMES.get(name, name) for name in original} | _options(name) | ONLY_BLOCKING
    assert set(twin) == expected


def test_every_option_can_be_read_and_set() -> None:
    scheme = aiosync.sync.SharedMemWeightSyncScheme(apply="manual", timeout=3.0)
    for name in _options():
        setattr(scheme, name, getattr(scheme, name))
    assert (scheme.apply, scheme.timeout) == ("manual", 3.0)
    scheme.timeout = None
    assert scheme.timeout is None


def test_an_argument_that_a_method_does_not_have_is_refused_in_its_name() -> None:
    scheme: Any = aiosync.sync.SharedMemWeightSyncScheme()
    with pytest.raises(TypeError, match=r"create_transport\(\) got .* 'function'"):
        scheme.create_transport(function=None)


METHODS = [
    (cls, name)
    for cls in CLASSES
    for name, value in _public(getattr(aiosync, cls)).items()
    if inspect.isfunction(value)
]


@pytest.mark.parametrize(("cls", "name"), METHODS)
def test_methods_have_the_same_signature_and_documentation(cls: str, name: str) -> None:
    original = getattr(getattr(aiosync, cls), name)
    twin = getattr(getattr(aiosync.sync, cls), OTHER_NAMES.get(name, name))
    assert not inspect.iscoroutinefunction(twin)
    assert twin.__doc__
    expected, found = inspect.signature(original), inspect.signature(twin)
    assert found.parameters == expected.parameters
    # Twins with another name differ in the result: send_async() returns a version, no handle.
    if name not in OTHER_NAMES:
        assert found.return_annotation == expected.return_annotation
        assert twin.__doc__ == original.__doc__
        assert twin.__name__ == original.__name__ or name == "init_on_worker"


PROPERTIES = [
    name for name, value in _public(aiosync.WeightSyncScheme).items() if isinstance(value, property)
]


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_are_the_same(name: str) -> None:
    original = getattr(aiosync.WeightSyncScheme, name)
    twin = getattr(aiosync.sync.WeightSyncScheme, name)
    assert isinstance(twin, property)
    assert (twin.fset is None) == (original.fset is None)
    assert twin.__doc__ == original.__doc__


def test_properties_read_the_async_scheme() -> None:
    scheme = aiosync.sync.SharedMemWeightSyncScheme()
    scheme.model_id = "value"
    scheme.worker_idx = 3
    assert not scheme.ready
    assert not scheme.ready.is_set()
    assert (scheme.model_id, scheme.worker_idx, scheme.lag) == ("value", 3, 0)
