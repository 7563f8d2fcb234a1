"""TorchRL's collector of dialogues, in a worker process that gets updates."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from multiprocessing.connection import Connection
from typing import Any

import pytest

from aiosync import sync

pytest.importorskip("torchrl")

from tests.integrations import _worlds as worlds

with warnings.catch_warnings():
    # TorchRL warns of its own classes while it is imported.
    warnings.simplefilter("ignore")
    from torchrl.collectors.llm import LLMCollector

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")

_NUM_VERSIONS = 60
_PATIENCE = 50.0


def _collect(scheme: sync.WeightSyncScheme, answers: Connection, kind: dict[str, Any]) -> None:
    collector = LLMCollector(
        # The pause lies between an action and its label.
        worlds.World(pause=0.001),
        policy=worlds.make_policy(),
        dialog_turns_per_batch=4,
        total_dialog_turns=-1,
        track_policy_version=True,
        **kind,
    )
    collector.register_scheme_receiver({"policy": scheme})
    try:
        pairs = list[tuple[float, float]]()
        for data in collector:
            labels = data["next", "policy_version"].flatten().tolist()
            pairs += zip(worlds.actions(data).tolist(), labels, strict=True)
            if scheme.version >= _NUM_VERSIONS and len({label for _, label in pairs}) > 5:
                break
        answers.send(pairs)
    finally:
        collector.shutdown()
        scheme.shutdown()


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param({}, id="on"),
        pytest.param({"reset_at_each_iter": True}, id="reset", marks=pytest.mark.heavy),
    ],
)
def test_labels_of_dialogues_are_the_versions_that_acted(kind: dict[str, Any]) -> None:
    policy = worlds.make_policy(1.0)
    context = multiprocessing.get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    scheme = sync.SharedMemWeightSyncScheme(timeout=_PATIENCE)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    process = context.Process(target=_collect, args=(scheme, theirs, kind), daemon=True)
    process.start()
    theirs.close()
    with scheme:
        scheme.connect(processes=[process])
        late = time.monotonic() + _PATIENCE / 2
        # A send does not wait for a dialogue: without a pause all sends would end during the first
        # one.
        while not mine.poll(0.01) and time.monotonic() < late:
            worlds.set_value(policy, float(scheme.version + 1))
            scheme.send()
        assert mine.poll(_PATIENCE / 2)
        pairs = mine.recv()
        process.join(_PATIENCE)
    assert process.exitcode == 0
    # The initial weights are version 1, and label 0.
    assert [(acted, label) for acted, label in pairs if acted != label + 1] == []
    assert len({label for _, label in pairs}) > 5
