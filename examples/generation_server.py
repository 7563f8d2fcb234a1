"""Shows a generation server whose weights change between two tokens, and which says so.

Run it with `python examples/generation_server.py`; it takes a few seconds. A small transformer
answers several prompts at a time, one token of all of them in each step. An async trainer in
another process sends versions meanwhile. With the mode "immediate" an update waits for the step
that is being computed, not for the prompts: long answers may have tokens of several versions, and
each answer names its own.
"""

import asyncio
import multiprocessing
import socket
import tempfile
from dataclasses import asdict, dataclass, field

import httpx
import torch
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route
from torch import nn

import aiosync
from aiosync.integrations.asgi import WeightsMiddleware
from aiosync.serving import Admission, AdmissionGate, WeightFeed

VOCABULARY = 64
CONTEXT = 32
SECONDS = 60.0  # at most


class Transformer(nn.Module):
    """A language model, as small as it gets."""

    def __init__(self, width=32):
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.places = nn.Embedding(CONTEXT, width)
        self.block = nn.TransformerEncoderLayer(width, 2, 2 * width, 0.0, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids):
        length = ids.shape[1]
        hidden = self.tokens(ids) + self.places(torch.arange(length))
        hidden = self.block(hidden, src_mask=nn.Transformer.generate_square_subsequent_mask(length))
        return self.head(hidden)


@dataclass
class Prompt:
    ids: list
    left: int
    """How many tokens are to come."""
    admission: Admission
    done: asyncio.Event = field(default_factory=asyncio.Event)


class Engine:
    """Computes one token of every running prompt at a time."""

    def __init__(self, model, gate):
        self.model = model
        self.gate = gate
        self.running = []
        self.work = asyncio.Event()

    async def generate(self, ids, length, admission):
        prompt = Prompt(list(ids), length, admission)
        self.running.append(prompt)
        self.work.set()
        await prompt.done.wait()
        return prompt

    async def run(self):
        while True:
            await self.work.wait()
            async with self.gate.batch() as version:  # one version for the whole step
                # In a thread, so that the loop goes on: updates arrive during the step.
                chosen = await asyncio.to_thread(self.step, [p.ids for p in self.running])
            for prompt, token in zip(list(self.running), chosen, strict=False):
                prompt.ids.append(token)
                prompt.admission.count(version)  # one token more of this version
                prompt.left -= 1
                if prompt.left == 0:
                    self.running.remove(prompt)
                    prompt.done.set()
            if not self.running:
                self.work.clear()

    def step(self, prompts):
        batch = torch.zeros(len(prompts), CONTEXT, dtype=torch.long)
        for row, ids in enumerate(prompts):
            batch[row, : len(ids)] = torch.tensor(ids)
        with torch.no_grad():
            logits = self.model(batch)
        return [logits[row, len(ids) - 1].argmax().item() for row, ids in enumerate(prompts)]


def make_app(engine, feed):
    async def generate(request):
        asked = await request.json()
        admission = request.scope["aiosync.admission"]
        prompt = await engine.generate(asked["ids"], asked["length"], admission)
        return JSONResponse({"ids": prompt.ids, "weights": asdict(admission.span)})

    routes = [Route("/generate", generate, methods=["POST"])]
    return WeightsMiddleware(Starlette(routes=routes), feed)


# -- the trainer ------------------------------------------------------------------------------


async def learn_to_count(address):
    torch.manual_seed(0)
    model = Transformer()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    scheme = aiosync.TCPWeightSyncScheme(address)
    scheme.init_on_sender(model=model)
    async with scheme:
        await scheme.connect()
        while True:
            ids = (torch.randint(VOCABULARY, (16, 1)) + torch.arange(CONTEXT)) % VOCABULARY
            logits = model(ids)[:, :-1]
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            scheme.send_nowait()  # a server that is slower than this skips to the newest
            await asyncio.sleep(0.01)


def train(address):
    torch.set_num_threads(1)
    aiosync.run(learn_to_count(address))


# -- all of it --------------------------------------------------------------------------------


async def ask(client, first, length, min_version=1):
    response = await client.post(
        "/generate",
        json={"ids": [first], "length": length},
        headers={"x-min-weight-version": str(min_version)},
    )
    response.raise_for_status()
    answer = response.json()
    begin, end, runs = (answer["weights"][name] for name in ("first", "last", "runs"))
    print(f"{length} tokens from {first}, of versions {begin} to {end}: {answer['ids'][1:9]} ...")
    assert sum(count for _, count in runs) == length
    return end


async def try_out(url):
    async with httpx.AsyncClient(base_url=url, timeout=60) as client:
        await asyncio.gather(*(ask(client, first, 24) for first in (3, 20, 40)))
        version = await ask(client, 7, 24)
        await ask(client, 7, 24, min_version=version + 100)  # waits until the trainer is there


async def serve(address):
    model = Transformer()
    feed = WeightFeed(
        aiosync.TCPWeightSyncScheme(address), model=model, gate=AdmissionGate(mode="immediate")
    )
    engine = Engine(model, feed.gate)
    server = uvicorn.Server(uvicorn.Config(make_app(engine, feed), log_level="warning"))
    with socket.create_server(("127.0.0.1", 0)) as sock:
        async with asyncio.timeout(SECONDS), asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(server.serve(sockets=[sock]))
            stepping = tasks.create_task(engine.run())
            await try_out(f"http://127.0.0.1:{sock.getsockname()[1]}")
            server.should_exit = True
            await serving
            stepping.cancel()


def main():
    torch.set_num_threads(1)
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        address = f"unix://{folder}/weights"  # the server dials it until the trainer listens
        trainer = spawn.Process(target=train, args=(address,), daemon=True)
        trainer.start()
        try:
            aiosync.run(serve(address))
        finally:
            trainer.terminate()
            trainer.join(10)


if __name__ == "__main__":
    main()
