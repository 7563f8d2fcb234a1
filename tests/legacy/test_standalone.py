"""The standalone examples of the older documentation, of which only the import line is changed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import pytest
from tensordict import TensorDict

import aiosync
from aiosync import legacy
from tests.legacy import _tools as workers
from tests.legacy._tools import BOTH
from tests.sync import _tools as tools

pytestmark = [pytest.mark.apart, pytest.mark.slow]

ROOT = Path(__file__).parents[2]

# The example is copied word for word, except for `from aiosync.legacy import`.
PROGRAM = """
import torch
import torch.nn as nn
from torch import multiprocessing as mp
from tensordict import TensorDict
from aiosync.legacy import (
    MultiProcessWeightSyncScheme,
    SharedMemWeightSyncScheme,
)

# Create a simple policy
policy = nn.Linear(4, 2)

# Example 1: Multiprocess weight synchronization with state_dict
# --------------------------------------------------------------
# On the main process side (trainer):
scheme = MultiProcessWeightSyncScheme(strategy="state_dict")

# Initialize scheme with pipes
parent_pipe, child_pipe = mp.Pipe()
scheme.init_on_sender(model_id="policy", pipes=[parent_pipe])

# Get the sender and send weights
sender = scheme.get_sender()
weights = policy.state_dict()
sender.send(weights)  # Synchronous send
# or sender.send_async(weights); sender.wait_async()  # Asynchronous send

# On the worker process side:
# scheme.init_on_worker(model_id="policy", pipe=child_pipe, model=policy)
# receiver = scheme.get_receiver()
# # Non-blocking check for new weights
# if receiver.receive(timeout=0.001):
#     # Weights were received and applied

# Example 2: Shared memory weight synchronization
# ------------------------------------------------
# Create shared memory scheme with auto-registration
shared_scheme = SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)

# Initialize with pipes for lazy registration
parent_pipe2, child_pipe2 = mp.Pipe()
shared_scheme.init_on_sender(model_id="policy", pipes=[parent_pipe2])

# Get sender and send weights (automatically creates shared buffer on first send)
shared_sender = shared_scheme.get_sender()
weights_td = TensorDict.from_module(policy)
shared_sender.send(weights_td)

# Workers automatically see updates via shared memory!
"""


def test_the_examples_run_word_for_word() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "default::ResourceWarning", "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=tools.PATIENCE,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert done.stderr.count("no worker has attached") == 2
    # The example closes neither schemes nor pipes, and must not be blamed for that.
    for noise in (*tools.NOISE, "Error", "ResourceWarning"):
        assert noise not in done.stderr, done.stderr


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_first_example_with_its_worker(method: str) -> None:
    policy = tools.filled(1.0)
    scheme = legacy.MultiProcessWeightSyncScheme(strategy="state_dict")
    parent_pipe, child_pipe = Pipe()
    with scheme, workers.worker(scheme, child_pipe, method) as work:
        scheme.init_on_sender(model_id="policy", pipes=[parent_pipe])
        sender = scheme.get_sender()
        work("attach")
        # No update has been sent yet.
        assert not work("receive", 0.001)
        work.receives(lambda: sender.send(policy.state_dict()))
        assert work("value") == 1.0
        assert not work("receive", 0.001)
        # The processes share no memory: a change in one of them does not reach the other.
        tools.fill(policy, 2.0)
        assert work("value") == 1.0
        work("fill", 3.0)
        assert tools.value_of(policy) == 2.0
        sender.send_async(policy.state_dict())
        # send_async() has taken its snapshot already.
        tools.fill(policy, 4.0)
        work.receives(sender.wait_async)
        assert work("value") == 2.0
    assert tools.portal_threads() == []


def test_workers_of_the_second_example_see_updates() -> None:
    policy = tools.filled(1.0)
    scheme = legacy.SharedMemWeightSyncScheme(strategy="tensordict", auto_register=True)
    parent_pipe, child_pipe = Pipe()
    with scheme, workers.worker(scheme, child_pipe) as work:
        scheme.init_on_sender(model_id="policy", pipes=[parent_pipe])
        sender = scheme.get_sender()
        work("attach")
        for value, send in ((1.0, sender.send), (2.0, sender.update_weights)):
            tools.fill(policy, value)
            send(TensorDict.from_module(policy))
            tools.fill(policy, 9.0)
            # In shared memory the worker has the update without a call of receive().
            assert work("value") == value
            assert work("receive", 0.001)
            assert not work("receive", 0.001)


# -- the end of the trainer --------------------------------------------------------------------


def _wait_for_the_end(make: Any, pipe: Any, say: Any) -> None:
    model = tools.filled(0.0)
    with make(strategy="state_dict") as scheme:
        scheme.init_on_worker(model_id="policy", pipe=pipe, model=model)
        receiver, received = scheme.get_receiver(), 0
        try:
            while receiver.receive(timeout=10.0):
                received += 1
            say.send("it never noticed")
        except aiosync.PeerClosed:
            say.send((received, tools.value_of(model)))


def _train(make: Any, say: Any, pipe: Any, sends: bool, kills: bool) -> None:
    scheme = make(strategy="state_dict")
    if pipe is None:
        pipe, theirs = Pipe()
        # The child also gets a copy of this end of the pipe, and outlives this process.
        context = workers.harness.context("fork")
        context.Process(target=_wait_for_the_end, args=(make, theirs, say)).start()
    scheme.init_on_sender(model_id="policy", pipes=[pipe])
    if sends:
        scheme.get_sender().send(workers.ones())
    if kills:
        os.kill(os.getpid(), signal.SIGKILL)


@BOTH
@pytest.mark.parametrize("sends", [True, False])
def test_a_trainer_that_is_killed_and_whose_workers_were_forked(make: Any, sends: bool) -> None:
    mine, theirs = Pipe()
    with mine, theirs, workers.process(_train, make, theirs, None, sends, True):
        assert tools.recv(mine) == ((1, 1.0) if sends else (0, 0.0))


@BOTH
@pytest.mark.parametrize("kills", [True, False])
def test_a_trainer_that_did_not_make_the_pipe(make: Any, kills: bool) -> None:
    mine, theirs = Pipe()
    # Both ends stay open in this process.
    pipe, other = Pipe()
    with (
        mine,
        theirs,
        pipe,
        other,
        workers.process(_wait_for_the_end, make, other, theirs),
        workers.process(_train, make, theirs, pipe, True, kills),
    ):
        assert tools.recv(mine) == (1, 1.0)
