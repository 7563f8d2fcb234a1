"""Shows a FastAPI server that follows a trainer, and says which version each answer is of.

Run it with `python examples/fastapi_server.py`; it needs fastapi, httpx and uvicorn.
"""

import multiprocessing
import socket

import httpx
import torch
import uvicorn
from fastapi import FastAPI

import aiosync
from aiosync.integrations.asgi import WeightsMiddleware
from aiosync.serving import WeightFeed


def serve(sock, trainer):
    policy = torch.nn.Linear(4, 1, bias=False)
    feed = WeightFeed(aiosync.TCPWeightSyncScheme(trainer), model=policy)
    app = FastAPI()
    app.add_middleware(WeightsMiddleware, feed=feed)  # one version for each request

    @app.post("/act")
    async def act(observation: list[float]) -> list[float]:
        with torch.no_grad():
            return policy(torch.tensor(observation)).tolist()

    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[sock])


async def main():
    policy = torch.nn.Linear(4, 1, bias=False)
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    scheme.init_on_sender(model=policy)
    with socket.create_server(("127.0.0.1", 0)) as sock:
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
        spawn = multiprocessing.get_context("spawn")
        server = spawn.Process(target=serve, args=(sock, scheme.address), daemon=True)
        server.start()  # ends with this program
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        async with scheme:
            await scheme.connect()
            for step in (1.0, 2.0):
                torch.nn.init.constant_(policy.weight, step)  # stands for an optimizer step
                await scheme.send()
                least = {"x-min-weight-version": str(scheme.version)}
                answer = await client.post("/act", json=[1.0] * 4, headers=least)
                print(f"version {answer.headers['x-weight-version']} answers {answer.json()}")
        answer = await client.post("/act", json=[1.0] * 4)
        print(f"no trainer: version {answer.headers['x-weight-version']} answers {answer.json()}")


if __name__ == "__main__":
    aiosync.run(main())
