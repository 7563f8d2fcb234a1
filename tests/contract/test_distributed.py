"""Checks of the contract over process groups of Gloo, with workers in processes of their own."""

from __future__ import annotations

from functools import partial

import pytest

import aiosync
from tests.contract.bench import PATIENCE, Hooks
from tests.contract.remote import Hired
from tests.contract.suite import ANYWHERE, Check

make = partial(
    aiosync.DistributedWeightSyncScheme, timeout=PATIENCE, shared_memory=False, inline_nbytes=64
)


@pytest.mark.parametrize("check", ANYWHERE, ids=lambda check: check.name)
@pytest.mark.slow
@pytest.mark.one_loop
@pytest.mark.asyncio
async def test_over_gloo(check: Check, forkserver: None) -> None:
    await check.run(make, Hooks(hire=Hired))
