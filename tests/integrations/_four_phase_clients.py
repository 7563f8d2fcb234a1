"""Clients of the four phases that ask as those of SkyRL and open-instruct do.

SkyRL's client is in no release, and open-instruct's engines are Ray actors in front of vLLM. So
these are programs of the tests, written after their sources: the same requests in the same order.
"""

from __future__ import annotations

import contextlib
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any, Self

import requests

import aiosync.sync
from aiosync.integrations.vllm import AiosyncTrainerEngine, HTTPClient
from tests.integrations._four_phase_servers import init_of
from tests.schemes import _models as models
from tests.schemes._harness import PATIENCE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import torch


# -- SkyRL ------------------------------------------------------------------------------------


class Fleet:
    """vLLM's four methods for several servers, as in SkyRL: all at once, and without a timeout.

    Each request has a connection of its own. All answers are awaited before the first error is
    raised, with the text of the body's ``error``.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = urls
        self._session = requests.Session()
        self._session.headers["Connection"] = "close"
        self._pool = ThreadPoolExecutor(2 * len(urls), thread_name_prefix="fleet")

    def close(self) -> None:
        self._pool.shutdown()
        self._session.close()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        # SkyRL has a hook for what differs from server to server.
        infos = [{**init_info, "first_worker": index} for index in range(len(self._urls))]
        self._post("init_weight_transfer_engine", *({"init_info": info} for info in infos))

    def start_weight_update(self) -> None:
        self._post("start_weight_update", None)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._post("update_weights", {"update_info": update_info})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        body = None if weight_version is None else {"weight_version": weight_version}
        self._post("finish_weight_update", body)

    def pause(self) -> None:
        self._post("pause?mode=keep&clear_cache=false", None)

    def resume(self) -> None:
        self._post("resume", None)

    def reset_prefix_cache(self) -> None:
        self._post("reset_prefix_cache", {"reset_running_requests": True})

    def world_size(self) -> int:
        replies = [self._session.get(f"{url}/get_world_size", json={}) for url in self._urls]
        return sum(int(reply.json()["world_size"]) for reply in replies)

    def _post(self, path: str, *bodies: Any) -> None:
        """Post a body for each server, or the same one to all of them."""
        each = bodies if len(bodies) > 1 else bodies * len(self._urls)
        calls = [
            self._pool.submit(self._post_to, url, path, body)
            for url, body in zip(self._urls, each, strict=True)
        ]
        wait(calls)
        for call in calls:
            call.result()

    def _post_to(self, url: str, path: str, body: Any) -> None:
        reply = self._session.post(f"{url}/{path}", json=body, timeout=None)
        if reply.status_code >= 400:
            said = reply.json()["error"]
            raise RuntimeError(f"{path} of {url} failed [{reply.status_code}]: {said}")


class Listed:
    """Source of a model's weights in the form of vLLM 0.28 to 0.32, as SkyRL has them."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._model = model

    def metadata(self) -> list[Any]:
        raise AssertionError("names and shapes travel with the weights")

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        for name, value in self._model.state_dict().items():
            yield name, value.detach().contiguous()


class Layered:
    """Source of a model's weights in the form of vLLM 0.33."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._whole = Listed(model)

    def iter_full(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self._whole


class SkyTrainer:
    """Trainer of a model in front of a fleet, which pauses it for each whole update."""

    def __init__(self, urls: Sequence[str], source: Callable[[Any], Any] = Listed) -> None:
        self.model = models.linear()
        self.fleet = Fleet(urls)
        try:
            # SkyRL pauses by itself, also for other back-ends.
            info = init_of(num_workers=self.fleet.world_size(), pause=None)
            self.engine = AiosyncTrainerEngine.trainer_init(
                info, client=self.fleet, source=source(self.model)
            )
        except BaseException:  # raised again: the caller gets it
            self.fleet.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.engine.shutdown()
        self.fleet.close()

    def update(self, value: float) -> None:
        models.fill(self.model, value)
        self.fleet.pause()
        try:
            with ThreadPoolExecutor(1) as beside:
                resetting = beside.submit(self.fleet.reset_prefix_cache)
                self.engine.send_weights()
                resetting.result()
        finally:
            self.fleet.resume()


# -- open-instruct ----------------------------------------------------------------------------


class EngineActor:
    """Actor of an engine with the methods that open-instruct calls; its engine is a server.

    A call returns a future at once, as that of a Ray actor does, and calls take turns.
    """

    def __init__(self, url: str) -> None:
        self._client = HTTPClient(url, timeout=PATIENCE)
        self._turn = ThreadPoolExecutor(1, thread_name_prefix="actor")
        self.model_step: int | None = None

    def close(self) -> None:
        self._turn.shutdown()

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> Future[None]:
        return self._turn.submit(self._client.init_weight_transfer_engine, init_info)

    def sleep(self) -> Future[None]:
        return self._turn.submit(self._client.pause_generation, "keep")

    def wake_up(self) -> Future[None]:
        return self._turn.submit(self._client.resume_generation)

    def update_weights(self, arguments: dict[str, Any], model_step: int) -> Future[None]:
        def update() -> None:
            self._client.start_weight_update()
            self._client.update_weights(arguments["update_info"])
            self._client.finish_weight_update()
            self.model_step = model_step

        return self._turn.submit(update)


def results(futures: Sequence[Future[None]]) -> None:
    """Wait for calls of actors, and raise the first error."""
    done, _ = wait(futures, PATIENCE)
    assert len(done) == len(futures)
    for each in futures:
        each.result()


class InstructTrainer:
    """Trainer of a model in front of actors, which asks them to receive before it sends."""

    def __init__(self, urls: Sequence[str]) -> None:
        self.model = models.linear()
        self.step = 0
        self._end = contextlib.ExitStack()
        self.actors = [EngineActor(url) for url in urls]
        for each in self.actors:
            self._end.callback(each.close)
        self._scheme = aiosync.sync.TCPWeightSyncScheme("tcp://127.0.0.1:0", "state_dict")
        self._end.callback(self._scheme.shutdown)
        self._scheme.init_on_sender(num_workers=len(urls))
        infos = [
            {"address": self._scheme.address, "first_worker": index, "model_id": "policy"}
            for index in range(len(urls))
        ]
        initialized = [
            actor.init_weight_transfer_engine(info)
            for actor, info in zip(self.actors, infos, strict=True)
        ]
        self._scheme.connect(timeout=PATIENCE)
        results(initialized)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._end.close()

    def update(self, value: float) -> None:
        """Send one update; as in open-instruct, an error leaves the engines asleep."""
        models.fill(self.model, value)
        self.step += 1
        results([actor.sleep() for actor in self.actors])
        arguments = {"update_info": {"version": self.step}}
        updating = [actor.update_weights(arguments, self.step) for actor in self.actors]
        assert self._scheme.send_async(self.model.state_dict()) == self.step
        try:
            results(updating)
        finally:
            report = self._scheme.wait_async()
        assert report.acked == set(range(len(self.actors)))
        results([actor.wake_up() for actor in self.actors])
