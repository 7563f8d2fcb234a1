"""Updates of a real engine of transformers: continuous batching on the CPU, with a small model."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import aiosync.sync
from aiosync.cli.files import load_weights, save_weights
from aiosync.errors import ApplyError, ConfigError, PartialSyncError
from aiosync.integrations.transformers import ContinuousBatchingReceiver
from aiosync.spans import VersionSpan
from tests.support.waiting import PATIENCE, wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [
    pytest.mark.skipif(
        not find_spec("transformers"), reason="needs transformers: `pip install transformers`"
    ),
    pytest.mark.slow,
    pytest.mark.timeout(180),
    # Of transformers itself, and of what it imports.
    pytest.mark.filterwarnings("default"),
]


@pytest.fixture(autouse=True)
def _quick() -> Iterator[None]:
    """Compute in one thread, and spare the collections with which managers end all old objects."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    make_model()  # the first one imports much
    gc.freeze()
    yield
    gc.unfreeze()
    torch.set_num_threads(before)


PROMPT = list(range(40))  # two pages and a half
PAGE = 16


def make_model(seed: int = 0) -> Any:
    """Make a language model whose head shares the memory of its embeddings."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=2048,
            tie_word_embeddings=True,
            initializer_range=0.3,
        )
    )


@contextlib.contextmanager
def managing(model: Any) -> Iterator[Any]:
    from transformers import GenerationConfig
    from transformers.generation import ContinuousBatchingConfig

    greedy = GenerationConfig(max_new_tokens=6, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=256, page_size=PAGE, max_batch_tokens=256)
    manager = model.init_continuous_batching(greedy, small)
    manager.start()
    try:
        yield manager
    finally:
        manager.stop(timeout=PATIENCE, hard_stop=True)
        manager.destroy()


class Ended:
    """Outputs by the names of their requests, whatever the order in which they end."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._outputs: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        late = time.monotonic() + PATIENCE
        while name not in self._outputs and time.monotonic() < late:
            output = self._manager.get_result(timeout=0.1)
            if output is not None and output.is_finished():
                self._outputs[output.request_id] = output
        return self._outputs.pop(name)


def generate(manager: Any, prompts: list[list[int]]) -> list[list[int]]:
    ended = Ended(manager)
    names = [manager.add_request(prompt) for prompt in prompts]
    return [ended[name].generated_tokens for name in names]


def fresh_answers(source: Any, prompts: list[list[int]]) -> list[list[int]]:
    """Return the answers of an engine that never had other weights than those of ``source``."""
    model = make_model(seed=99)
    model.load_state_dict(source.state_dict())
    with managing(model) as manager:
        return generate(manager, prompts)


@torch.no_grad()
def change(model: Any, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for each in model.parameters():
        each.add_(torch.randn(each.shape, generator=generator) * 0.1)


@contextlib.contextmanager
def following(**options: Any) -> Iterator[tuple[Any, Any, Any, ContinuousBatchingReceiver]]:
    """Yield a trainer's model, its scheme, and the manager and receiver that follow it."""
    source, trainer = make_model(seed=1), aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    trainer.init_on_sender(model=source)
    with trainer, managing(make_model()) as manager:
        scheme = aiosync.sync.TCPWeightSyncScheme(trainer.address)
        receiver = ContinuousBatchingReceiver(scheme, manager, **options)
        # The trainer listens from connect() on; the receiver dials until it does.
        with connected(trainer, receiver):
            wait_until(lambda: receiver.version == 1)  # it comes with the link
            yield source, trainer, manager, receiver


@contextlib.contextmanager
def connected(trainer: Any, receiver: ContinuousBatchingReceiver) -> Iterator[None]:
    dialing = threading.Thread(target=receiver.connect, kwargs={"timeout": PATIENCE})
    dialing.start()
    try:
        trainer.connect(timeout=PATIENCE)
        dialing.join(PATIENCE)
        yield
    finally:
        receiver.close()


def started(manager: Any, name: str, tokens: int = 3) -> bool:
    states = manager.batch_processor.scheduler.active_requests
    return name in states and len(states[name].generated_tokens) >= tokens


def test_twenty_updates_answer_as_fresh_engines() -> None:
    # Requests share their prefix with each other, and with those of older versions.
    prompts = [PROMPT, PROMPT[:33], PROMPT[:20] + PROMPT[:20]]
    with following() as (source, trainer, manager, receiver):
        before = generate(manager, prompts)
        for round_ in range(20):
            change(source, round_)
            report = trainer.send(timeout=PATIENCE)
            assert report.acked == {0}
            assert receiver.version == report.version
            answers = generate(manager, prompts)
            assert answers == fresh_answers(source, prompts)
            assert answers != before
            before = answers


@pytest.mark.parametrize("flush", ["prefix", "keep"])
def test_a_running_request_goes_on_and_shares_its_cache_only_with_keep(flush: Any) -> None:
    with following(flush=flush) as (source, trainer, manager, receiver):
        first = trainer.send(timeout=PATIENCE).version
        ended = Ended(manager)
        long = manager.add_request(PROMPT[:10], request_id="long", max_new_tokens=120)
        wait_until(lambda: started(manager, "long"))
        change(source, 7)
        second = trainer.send(timeout=PATIENCE).version
        # Its first page was half full at the switch, and is full now.
        wait_until(lambda: started(manager, "long", tokens=40))
        prefix = manager.batch_processor.scheduler.active_requests["long"].generated_tokens[:30]
        prompt = PROMPT[:10] + prefix
        answer = generate_beside(manager, ended, prompt)
        assert (answer == fresh_answers(source, [prompt])[0]) == (flush == "prefix")
        output = ended[long]
        span = receiver.span_of(output)
        assert (span.first, span.last) == (first, second)
        assert [version for version, _ in span.runs] == [first, second]
        assert sum(tokens for _, tokens in span.runs) == len(output.generated_tokens) == 120
        assert span.epoch == f"{trainer.epoch:016x}"
        assert trainer.staleness(span) == 1.0


def generate_beside(manager: Any, ended: Ended, prompt: list[int]) -> list[int]:
    return ended[manager.add_request(prompt)].generated_tokens


def test_abort_fails_what_has_begun_with_its_tokens() -> None:
    with following(flush="abort") as (source, trainer, manager, receiver):
        first = trainer.send(timeout=PATIENCE).version
        ended = Ended(manager)
        manager.add_request(PROMPT, request_id="long", max_new_tokens=1000)
        wait_until(lambda: started(manager, "long"))
        trainer.send(timeout=PATIENCE)
        output = ended["long"]
        took = f"version {first + 1} of the weights took the place of version {first}"
        assert output.error == f"aborted: {took}"
        assert 3 <= len(output.generated_tokens) < 1000
        runs = ((first, len(output.generated_tokens)),)
        assert receiver.span_of(output) == VersionSpan(first, first, f"{trainer.epoch:016x}", runs)
        assert generate(manager, [PROMPT]) == fresh_answers(source, [PROMPT])
        wait_until(lambda: not manager.batch_processor.has_pending_requests())


def test_spans_of_requests_between_updates() -> None:
    with following() as (_, trainer, manager, receiver):
        ended, spans = Ended(manager), []
        for _ in range(3):
            output = ended[manager.add_request(PROMPT)]
            spans.append((output, trainer.version))
            trainer.send(timeout=PATIENCE)
        for output, version in spans:  # asked late, when other versions have come
            span = receiver.span_of(output)
            assert (span.first, span.last) == (version, version)
            assert span.runs == ((version, 6),)


def test_a_request_with_the_id_of_a_cancelled_one_has_its_own_span() -> None:
    with following() as (_, trainer, manager, receiver):
        ended = Ended(manager)
        for prompt in (PROMPT[:10], PROMPT[:20]):
            manager.add_request(prompt, request_id="one", max_new_tokens=1000)
            wait_until(lambda: started(manager, "one"))
            version = trainer.send(timeout=PATIENCE).version
            wait_until(lambda: started(manager, "one", tokens=20))
            manager.cancel_request("one")
            wait_until(lambda: not manager.batch_processor.has_pending_requests())
        manager.add_request(PROMPT, request_id="one")
        span = receiver.span_of(ended["one"])
        assert (span.first, span.last, span.runs) == (version, version, ((version, 6),))
        # This one sees a switch itself.
        manager.add_request(PROMPT[:10], request_id="one", max_new_tokens=1000)
        wait_until(lambda: started(manager, "one"))
        trainer.send(timeout=PATIENCE)
        span = receiver.span_of(ended["one"])
        assert (span.first, span.last, sum(n for _, n in span.runs)) == (version, version + 1, 1000)


def test_a_request_that_gave_up_its_place_in_the_cache_keeps_its_versions() -> None:
    with following() as (_, trainer, manager, receiver):
        ended, first = Ended(manager), trainer.version
        manager.add_request(PROMPT, request_id="long", max_new_tokens=1000)
        wait_until(lambda: started(manager, "long"))
        second = trainer.send(timeout=PATIENCE).version
        wait_until(lambda: started(manager, "long", tokens=20))
        # As the manager itself does it when its cache is full.
        with manager.pause():
            scheduler = manager.batch_processor.scheduler
            state = scheduler.active_requests["long"]
            anew = state.create_equivalent_initial_request()
            state.status = type(state.status).FINISHED
            scheduler.finish_request("long")
            scheduler.add_waiting_request(anew)
        span = receiver.span_of(ended["long"])
        assert [version for version, _ in span.runs] == [first, second]
        assert sum(tokens for _, tokens in span.runs) == 1000


@pytest.mark.parametrize(
    "call",
    [
        lambda scheme: scheme.wait_for_version(2, timeout=PATIENCE),
        lambda scheme: scheme.receive(timeout=PATIENCE),
        lambda scheme: scheme.pull(min_version=2, timeout=PATIENCE),
    ],
    ids=["wait_for_version", "receive", "pull"],
)
def test_calls_that_wait_leave_the_update_to_the_pause(call: Any) -> None:
    with following() as (source, trainer, manager, receiver):
        receiver.scheme.receive(timeout=0)  # reports the first version
        generate(manager, [PROMPT])
        with ThreadPoolExecutor(1) as threads:
            waiting = threads.submit(call, receiver.scheme)
            time.sleep(0.3)
            change(source, 7)
            trainer.send(timeout=PATIENCE)
            waiting.result(PATIENCE)
        assert receiver.version == 2
        assert generate(manager, [PROMPT]) == fresh_answers(source, [PROMPT])


def refuse_third(weights: Any) -> Any:
    """Raise in the middle of the third update."""
    refuse_third.calls += 1  # type: ignore[attr-defined]
    for number, item in enumerate(weights):
        if refuse_third.calls == 3 and number == 5:  # type: ignore[attr-defined]
            raise RuntimeError("no such layer here")
        yield item


def test_an_update_that_fails_leaves_the_engine_on_its_version() -> None:
    refuse_third.calls = 0  # type: ignore[attr-defined]
    with following(transform=refuse_third) as (source, trainer, manager, receiver):
        change(source, 2)
        trainer.send(timeout=PATIENCE)
        answers = generate(manager, [PROMPT])
        change(source, 3)
        with pytest.raises(PartialSyncError) as caught:
            trainer.send(timeout=PATIENCE)
        assert isinstance(caught.value.failed[0], ApplyError)
        assert "no such layer here" in str(caught.value)
        assert receiver.version == 2
        assert generate(manager, [PROMPT]) == answers
        assert trainer.send(timeout=PATIENCE).acked == {0}
        assert generate(manager, [PROMPT]) == fresh_answers(source, [PROMPT])


def test_a_cache_that_cannot_be_flushed_ends_the_receiver() -> None:
    with following() as (source, trainer, manager, receiver):
        answers = generate(manager, [PROMPT])

        def gone() -> None:
            raise AttributeError("this transformers has another cache")

        manager.batch_processor.cache.evict_cached_blocks = gone
        change(source, 1)
        with pytest.raises(PartialSyncError):
            trainer.send(timeout=PATIENCE)
        assert isinstance(receiver.error, AttributeError)
        assert generate(manager, [PROMPT]) == answers


def test_weights_of_another_model_are_refused() -> None:
    trainer = aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    trainer.init_on_sender(model=torch.nn.Linear(4, 2))
    with trainer, managing(make_model()) as manager:
        answers = generate(manager, [PROMPT])
        scheme = aiosync.sync.TCPWeightSyncScheme(trainer.address)
        receiver = ContinuousBatchingReceiver(scheme, manager)
        with connected(trainer, receiver):
            with pytest.raises(PartialSyncError, match=r"model\.embed_tokens\.weight"):
                trainer.send(timeout=PATIENCE)
            assert generate(manager, [PROMPT]) == answers
            assert receiver.error is None


def test_updates_of_a_manager_that_does_not_run() -> None:
    with following() as (source, trainer, manager, receiver):
        generate(manager, [PROMPT])
        manager.stop(timeout=PATIENCE, keep_for_next_session=True)
        change(source, 1)
        assert trainer.send(timeout=PATIENCE).acked == {0}
        manager.switch_to_cb_friendly_attn(manager.model)
        manager.start()
        assert generate(manager, [PROMPT]) == fresh_answers(source, [PROMPT])
        assert receiver.version == trainer.version


def train(address: Any, stop_at: int) -> None:
    """Send updates, and then wait to be killed; in a process of its own."""
    torch.set_num_threads(1)
    source = make_model(seed=1)
    trainer = aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    trainer.init_on_sender(model=source)
    address.send(trainer.address)
    trainer.connect(timeout=PATIENCE)
    for _ in range(stop_at):
        trainer.send(timeout=PATIENCE)
    address.send("sent")
    # The kill comes in the middle of one of these.
    while True:
        trainer.send(timeout=PATIENCE)


def test_nothing_hangs_when_the_trainer_is_killed() -> None:
    ours, theirs = multiprocessing.Pipe()
    context = multiprocessing.get_context("spawn")
    process = context.Process(target=train, args=(theirs, 2), daemon=True)
    process.start()
    try:
        assert ours.poll(PATIENCE * 4)
        scheme = aiosync.sync.TCPWeightSyncScheme(ours.recv())
        with managing(make_model()) as manager:
            with ContinuousBatchingReceiver(scheme, manager) as receiver:
                assert ours.poll(PATIENCE)
                os.kill(process.pid or 0, signal.SIGKILL)
                process.join(PATIENCE)
                wait_until(lambda: scheme.link_lost is not None)
                answers = generate(manager, [PROMPT])
                assert answers == fresh_answers(make_model(seed=1), [PROMPT])
                assert receiver.version >= 2
                began = time.monotonic()
            assert time.monotonic() - began < 5.0
            assert receiver.error is None
            assert generate(manager, [PROMPT]) == answers
    finally:
        process.kill()
        process.join(PATIENCE)
        process.close()
        ours.close()
        theirs.close()


def test_a_manager_that_is_stuck_holds_up_no_close() -> None:
    stuck, go = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        stuck.set()
        go.wait(4 * PATIENCE)

    with following() as (_, trainer, manager, receiver), ThreadPoolExecutor(2) as threads:
        handle = manager.model.register_forward_pre_hook(wait)
        try:
            manager.add_request(PROMPT)
            assert stuck.wait(PATIENCE)
            sending = threads.submit(trainer.send, timeout=PATIENCE)
            time.sleep(0.5)  # the receiver waits until the manager has paused
            threads.submit(receiver.close).result(PATIENCE + 5.0)
            assert not go.is_set()
        finally:
            go.set()
            handle.remove()
        assert not sending.result(PATIENCE).acked
        assert receiver.error is None and receiver.version == 1


def test_what_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    scheme = aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:9")
    with managing(make_model()) as manager:
        with pytest.raises(ConfigError, match="flush must be 'prefix', 'abort' or 'keep'"):
            ContinuousBatchingReceiver(scheme, manager, flush="all")  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="a blocking scheme that receives weights"):
            ContinuousBatchingReceiver(aiosync.sync.NoWeightSyncScheme(), manager)
        with pytest.raises(ConfigError, match=r"ContinuousBatchingManager of transformers 5\.23"):
            ContinuousBatchingReceiver(scheme, object())
        manager.continuous_batching_config.cpu_offload_space = 1.0
        with pytest.raises(ConfigError, match="needs a manager with cpu_offload_space=0"):
            ContinuousBatchingReceiver(scheme, manager)
        monkeypatch.setattr("importlib.metadata.version", lambda _: "5.22.2")
        with pytest.raises(ConfigError, match=r"ContinuousBatchingManager with transformers 5\.22"):
            ContinuousBatchingReceiver(scheme, manager)


def test_folders_of_weights_are_read_and_written(tmp_path: Path) -> None:
    """``save_pretrained()`` makes what is pushed; ``from_pretrained()`` reads what is pulled."""
    from transformers import LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()  # it leaves a thread
    model = make_model()
    model.save_pretrained(tmp_path, max_shard_size=20_000)
    assert (tmp_path / "model.safetensors.index.json").exists()
    found, own = load_weights(tmp_path), model.state_dict()
    assert own.keys() - found.keys() == {"lm_head.weight"}  # it is tied, and saved once
    assert all(torch.equal(each, own[name]) for name, each in found.items())
    pulled = tmp_path / "pulled"
    pulled.mkdir()
    model.config.save_pretrained(pulled)
    save_weights(pulled, own)
    again = LlamaForCausalLM.from_pretrained(pulled).state_dict()
    assert all(torch.equal(each, again[name]) for name, each in own.items())
