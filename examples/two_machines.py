"""Shows two machines: a trainer listens on TCP, a worker dials it, and both have a token file.

Run it with `python examples/two_machines.py`, where both are on this machine; or, on two of them,
with `train tcp://0.0.0.0:7000 token` and `work tcp://TRAINERS-NAME:7000 token` after it.
"""

import multiprocessing
import secrets
import socket
import sys
import tempfile
from pathlib import Path

from torch import nn

import aiosync


async def train(url, token):
    policy = nn.Linear(4, 2)
    scheme = aiosync.TCPWeightSyncScheme(url, token=token)
    scheme.init_on_sender(model_id="policy", model=policy, num_workers=1)
    async with scheme:
        await scheme.connect()  # until the worker has dialled and shown that it has the token
        for _ in range(3):
            nn.init.normal_(policy.weight)  # stands for an optimizer step
            report = await scheme.send()
            print(f"trainer: version {report.version} is applied by workers {sorted(report.acked)}")


async def work(url, token):
    policy = nn.Linear(4, 2)
    scheme = aiosync.TCPWeightSyncScheme(url, token=token, reconnect=2)
    scheme.init_on_receiver(model_id="policy", model=policy)
    async with scheme:
        await scheme.connect()  # dials until the trainer is there; at most 120 s
        try:
            while True:
                await scheme.receive()
        except aiosync.PeerClosed:  # no trainer for 2 s
            print(f"worker: the trainer has gone; the policy stays at version {scheme.version}")


def main(role, url, token_file):
    token = Path(token_file).read_text().strip()  # it is never sent
    aiosync.run(train(url, token) if role == "train" else work(url, token))


if __name__ == "__main__" and len(sys.argv) == 4:
    main(*sys.argv[1:])
elif __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as free:
        url = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "token")
        path.touch(0o600)  # before the secret is in it
        path.write_text(secrets.token_urlsafe())
        worker = multiprocessing.get_context("spawn").Process(target=main, args=("work", url, path))
        worker.start()  # this program waits for its end
        main("train", url, path)
