"""What the owner of a model is told on the way of an update, and how it refuses one."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest
import torch

import aiosync
from tests.schemes import _harness as harness
from tests.schemes import _models as models

pytestmark = [pytest.mark.asyncio, pytest.mark.one_loop]
both = pytest.mark.parametrize("make", harness.SCHEMES)
kinds = pytest.mark.parametrize("kind", ["plain", "async"])


class Refuses(Exception):
    """What a hook of these tests raises."""


class Owner:
    """Notes what it is told, as a plain function or as an async one."""

    def __init__(self, kind: str) -> None:
        self.told: list[tuple[str, int]] = []
        self.refused: str | None = None
        self._kind = kind

    def hook(self, name: str) -> Any:
        def plain(epoch: Any, version: int = 0) -> None:
            self.told.append((name, version))
            if self.refused == name:
                raise Refuses(f"not {version}")

        async def slow(epoch: Any, version: int = 0) -> None:
            await asyncio.sleep(0.001)
            plain(epoch, version)

        return plain if self._kind == "plain" else slow

    def hooks(self, *names: str) -> dict[str, Any]:
        hooks = aiosync.SchemeHooks(**{name: self.hook(name) for name in names})
        return {"hooks": hooks}


def taking(make: Any, owner: Owner, *names: str) -> Any:
    source = {"model": models.linear(1.0)}
    return harness.here(make(), models.linear(), sender=source, receiver=owner.hooks(*names))


@both
@kinds
async def test_they_are_called_in_order_and_before_the_trainer_is_told(make, kind) -> None:
    owner = Owner(kind)
    names = ("prepare_model", "before_apply", "applied", "relay")
    async with taking(make, owner, *names) as (sender, receiver):
        first = [("prepare_model", 0), ("before_apply", 1), ("applied", 1), ("relay", 1)]
        assert owner.told == first
        assert (await sender.send()).acked == {0}
        assert owner.told == [*first, *((name, 2) for name in names[1:])]
        assert receiver.version == 2


@both
@kinds
@pytest.mark.parametrize("name", ["before_apply", "applied", "relay"])
async def test_what_they_raise_is_a_refusal(make, kind, name) -> None:
    owner = Owner(kind)
    async with taking(make, owner, name) as (sender, receiver):
        model = receiver.model
        owner.refused = name
        for k in (2, 3):
            with pytest.raises(aiosync.PartialSyncError) as caught:
                await sender.send(models.linear(float(k)))
                with contextlib.suppress(aiosync.ApplyError):  # a forward may be what takes it
                    model(torch.ones(1, 4))
                await sender.send(models.linear(float(k)))
            error = caught.value.failed[0]
            assert isinstance(error, aiosync.ApplyError)
            assert error.remote_type == "Refuses"
            assert "not " in str(error)
            kept = 1.0 if name == "before_apply" else float(k)
            with receiver.reading():
                assert models.filled(model, kept)
        owner.refused = None
        assert (await sender.send(models.linear(9.0))).acked == {0}
        assert models.holds(receiver, 9.0)


@both
@kinds
async def test_a_model_that_is_refused_does_not_join(make, kind) -> None:
    owner = Owner(kind)
    owner.refused = "prepare_model"
    scheme = make(timeout=10.0)
    scheme.init_on_sender(model=models.linear(1.0), num_workers=1)
    worker = harness.twin(scheme)
    worker.init_on_receiver(model=models.linear(), **owner.hooks("prepare_model"))
    async with scheme, worker:
        with pytest.raises(Refuses, match="not 0"):
            await worker.connect()
        with pytest.raises(aiosync.ConnectTimeout):
            await scheme.connect(timeout=0.1)


@both
@kinds
async def test_applied_is_called_in_forwards_of_workers_that_look_by_themselves(make, kind) -> None:
    owner = Owner(kind)
    async with taking(make, owner, "applied") as (sender, receiver):
        for k in range(2, 8):
            await sender.send(models.linear(float(k)))
            receiver.model(torch.ones(1, 4))
            assert owner.told[-1] == ("applied", k)
            assert models.holds(receiver, float(k))


async def test_mistakes() -> None:
    scheme = aiosync.SharedMemWeightSyncScheme()
    with pytest.raises(aiosync.ConfigError, match="relay must be callable, got int"):
        aiosync.SchemeHooks(relay=3)  # type: ignore[arg-type]
    with pytest.raises(aiosync.ConfigError, match="hooks must be aiosync.SchemeHooks"):
        scheme.init_on_receiver(hooks={"relay": print})
