"""Shows a server that a trainer updates as it updates vLLM's, between requests of its clients.

pip install torch==2.13.0 -e '.[asgi]'  # once it is released: 'aiosync[asgi]'
python examples/four_phase_server.py
"""

import asyncio
import json
import socket
from typing import Any

import httpx
import torch
import uvicorn

from aiosync.integrations.four_phase import FourPhaseMiddleware
from aiosync.integrations.vllm import AiosyncTrainerEngine, AiosyncTrainerInitInfo, HTTPClient

UPDATES = 20
policy = torch.nn.Linear(4, 2)


async def act(scope: Any, receive: Any, send: Any) -> None:
    """Answer each request with the model; any ASGI application will do."""
    with torch.no_grad():
        answer = policy(torch.ones(4)).tolist()
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": json.dumps(answer).encode()})


def train(url: str) -> dict[int, list[float]]:
    """Send updates from a thread without a loop; return the answers of each version."""
    trained, answers = torch.nn.Linear(4, 2), {}
    info = AiosyncTrainerInitInfo(rank=0)
    with AiosyncTrainerEngine.trainer_init(info, client=HTTPClient(url)) as engine:
        for _ in range(UPDATES):
            with torch.no_grad():
                trained.weight.add_(0.1)
                engine.stage(trained.state_dict())  # the server goes on answering
                answers[engine.activate().version] = trained(torch.ones(4)).tolist()
        print(f"version {engine.active_version} is active: paused for {engine.last.paused:.3f} s")
    return answers


async def main() -> None:
    app = FourPhaseMiddleware(act, model=policy)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        serving = asyncio.create_task(server.serve([listening]))
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        training = asyncio.create_task(asyncio.to_thread(train, url))
        seen = []
        async with httpx.AsyncClient() as client:
            while not training.done():
                reply = await client.get(f"{url}/act", timeout=30)
                seen.append((int(reply.headers["x-weight-version"]), reply.json()))
        answers = await training
        server.should_exit = True
        await serving
    right = sum(answer == answers[version] for version, answer in seen)
    print(f"{len(seen)} answers during {UPDATES} updates, {right} of them as the trainer computes")


if __name__ == "__main__":
    asyncio.run(main())
