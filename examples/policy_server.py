"""Shows a policy server: Starlette under uvicorn, clients that ask it, a trainer that updates it.

Run it with `python examples/policy_server.py`; it takes a few seconds. Three processes take part:
a trainer pushes versions over TCP, a server answers with them between two requests, and this one
asks and looks at the headers. At the end the trainer leaves, and the server goes on.
"""

import asyncio
import multiprocessing
import socket
import time

import httpx
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import nn

import aiosync
from aiosync.integrations.asgi import WeightsMiddleware
from aiosync.serving import WeightFeed

SECONDS = 2.0
CLIENTS = 4


def make_policy():
    return nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))


# -- the server -------------------------------------------------------------------------------


def make_app(policy, feed, **options):
    """The application; `options` go to the middleware."""

    async def act(request):
        observation = torch.tensor(await request.json())
        with torch.no_grad():
            return JSONResponse(policy(observation).tolist())

    routes = [Route("/act", act, methods=["POST"])]
    # It starts the feed, holds each request to one version, and adds headers and /readyz.
    return WeightsMiddleware(Starlette(routes=routes), feed, **options)


def serve(sock, addresses):
    torch.set_num_threads(1)
    policy = make_policy()
    feed = WeightFeed(aiosync.TCPWeightSyncScheme(addresses.get(timeout=60)), model=policy)
    config = uvicorn.Config(make_app(policy, feed), loop="uvloop", log_level="warning")
    uvicorn.Server(config).run(sockets=[sock])


# -- the trainer ------------------------------------------------------------------------------


async def push(addresses, stop):
    policy = make_policy()
    scheme = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0")
    scheme.init_on_sender(model=policy)
    addresses.put(str(scheme.address))
    async with scheme:
        await scheme.connect()  # servers may come and go: it waits for none
        while not stop.is_set():
            with torch.no_grad():
                for parameter in policy.parameters():
                    parameter.add_(0.01 * torch.randn_like(parameter))  # in place of learning
            await scheme.send()
            await asyncio.sleep(0.05)


def train(addresses, stop):
    torch.set_num_threads(1)
    aiosync.run(push(addresses, stop))


# -- the clients ------------------------------------------------------------------------------


async def ask(client, end):
    """Ask again and again; returns the versions that answered, and how long each took."""
    answers = []
    while time.monotonic() < end:
        began = time.perf_counter()
        response = await client.post("/act", json=[0.1, 0.2, 0.3, 0.4])
        response.raise_for_status()
        seconds = time.perf_counter() - began
        answers.append((int(response.headers["x-weight-version"]), seconds))
    return answers


async def wait_for(client, state):
    """Ask the probe until the feed is in this state; returns its status."""
    while True:
        status = (await client.get("/readyz")).json()
        if status["state"] == state:
            return status
        await asyncio.sleep(0.05)


async def try_out(url, stop):
    async with httpx.AsyncClient(base_url=url, timeout=30) as client, asyncio.timeout(60):
        await wait_for(client, "live")
        end = time.monotonic() + SECONDS
        runs = await asyncio.gather(*(ask(client, end) for _ in range(CLIENTS)))
        answers = sorted(answer for run in runs for answer in run)
        in_order = all(run == sorted(run, key=lambda answer: answer[0]) for run in runs)
        seconds = sorted(seconds for _, seconds in answers)
        print(
            f"{len(answers)} answers by versions {answers[0][0]} to {answers[-1][0]}, "
            f"for each client in order: {in_order}"
        )
        print(f"half of them within {seconds[len(seconds) // 2] * 1e3:.1f} ms")

        newer = answers[-1][0] + 3
        response = await client.post(
            "/act", json=[0.0] * 4, headers={"x-min-weight-version": str(newer)}
        )
        print(f"version {newer} was asked for: {response.headers['x-weight-version']} answered")

        stop.set()
        status = await wait_for(client, "stale")
        response = await client.post("/act", json=[0.0] * 4)
        version = response.headers["x-weight-version"]
        print(f"the trainer has left: {status['reason']}")
        print(f"the server goes on: {response.status_code} by version {version}")


def main():
    spawn = multiprocessing.get_context("spawn")
    addresses, stop = spawn.Queue(), spawn.Event()
    with socket.create_server(("127.0.0.1", 0)) as sock:
        server = spawn.Process(target=serve, args=(sock, addresses), daemon=True)
        trainer = spawn.Process(target=train, args=(addresses, stop), daemon=True)
        server.start()
        trainer.start()
        url = f"http://127.0.0.1:{sock.getsockname()[1]}"
    try:
        asyncio.run(try_out(url, stop))
    finally:
        stop.set()
        server.terminate()  # uvicorn ends in order, and the feed with it
        for process in (server, trainer):
            process.join(10)


if __name__ == "__main__":
    main()
