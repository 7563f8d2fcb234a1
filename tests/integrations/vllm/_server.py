"""A vLLM server and its clients, as tests use them."""

from __future__ import annotations

import subprocess
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import requests

from tests.integrations.vllm._tools import PROMPTS, SAMPLING

TOKEN = "a token that only the tests know"

Choice = dict[str, Any]


class Server:
    """A vLLM server that runs."""

    def __init__(self, url: str, log: Path, process: subprocess.Popen[bytes]) -> None:
        self.url = url
        self._log = log
        self._process = process

    def log_text(self) -> str:
        return self._log.read_text(errors="replace")

    def is_up(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=5).ok
        except requests.ConnectionError:
            return False

    def post(self, path: str, json: Any = None, timeout: float = 30.0) -> requests.Response:
        return requests.post(f"{self.url}/{path}", json=json, timeout=timeout)

    def generate(self, prompt: Sequence[int], **sampling: Any) -> Choice:
        body = {"token_ids": list(prompt), "sampling_params": {**SAMPLING, **sampling}}
        reply = self.post("inference/v1/generate", body, timeout=60.0)
        assert reply.ok, reply.text
        choice: Choice = reply.json()["choices"][0]
        return choice

    def tokens(self) -> list[list[int]]:
        return [self.generate(prompt)["token_ids"] for prompt in PROMPTS]

    def label(self) -> str:
        """Return the version that the engine reports, without its epoch."""
        found: str = requests.get(f"{self.url}/weight_info", timeout=10).json()["weight_version"]
        return found.partition("@")[0]

    def checksums(self) -> dict[str, str]:
        reply = self.post("weight_checker", {"action": "checksum"})
        assert reply.ok, reply.text
        found: dict[str, str] = reply.json()["checksums"]
        return found

    def is_paused(self) -> bool:
        found: bool = requests.get(f"{self.url}/is_paused", timeout=10).json()["is_paused"]
        return found

    def running(self) -> int:
        """Return the number of requests that the server computes now."""
        for line in requests.get(f"{self.url}/metrics", timeout=10).text.splitlines():
            if line.startswith("vllm:num_requests_running"):
                return int(float(line.rpartition(" ")[2]))
        raise AssertionError("the server has no such metric")


class Clients:
    """Clients that send one request after another until the block ends."""

    def __init__(self, server: Server, number: int, max_tokens: int) -> None:
        self._server = server
        self._max_tokens = max_tokens
        self._stop = threading.Event()
        self.answers: list[Choice] = []
        self.errors: list[str] = []
        self._threads = [
            threading.Thread(target=self._run, args=(index,)) for index in range(number)
        ]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        self.wait_until_running(len(self._threads))
        return self

    def wait_until_running(self, number: int = 1) -> None:
        """Wait until at least this many requests run at the same time."""
        deadline = time.monotonic() + 60
        while self._server.running() < number:
            assert not self.errors, self.errors
            assert time.monotonic() < deadline, "the requests do not run"
            time.sleep(0.02)

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60)

    def _run(self, index: int) -> None:
        while not self._stop.is_set():
            try:
                answer = self._server.generate([10 + index, 3], max_tokens=self._max_tokens)
            except (requests.RequestException, AssertionError) as exc:
                self.errors.append(repr(exc))
                return
            self.answers.append(answer)
