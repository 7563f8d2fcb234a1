"""Shows LoRA adapters: only they are sent, and each version has a name in the worker.

The worker computes with the newest version, and with the one before by its name. Needs PEFT:
`pip install -e '.[peft]'`.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import peft
import torch
from torch import nn

import aiosync.sync
from aiosync.integrations.lora import PeftAdapterReceiver

NUM_UPDATES = 5


def make_model() -> Any:
    torch.manual_seed(0)  # the base weights are the same everywhere, and never travel
    base = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 2))
    return peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules=["0", "2"])).eval()


def work(scheme: aiosync.sync.WeightSyncScheme) -> None:
    model = make_model()
    adapters = PeftAdapterReceiver(scheme, model, keep=2)
    x = torch.ones(1, 64)
    with scheme, torch.no_grad():
        scheme.connect()
        before, version = None, 0
        while version < NUM_UPDATES:
            scheme.wait_for_version(version + 1)
            with scheme.reading():
                newest = adapters.newest
                assert newest is not None
                print(f"{newest.name}: {model(x)[0].tolist()}", flush=True)
                if before is not None and before.name in model.peft_config:
                    print(f"  {before.name}: {model(x, adapter_names=[before.name])[0].tolist()}")
                before, version = newest, newest.version


def main() -> None:
    model = make_model()
    optimizer = torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-2)
    scheme = aiosync.sync.SharedMemWeightSyncScheme(guard="reading", timeout=60)
    scheme.init_on_sender(num_workers=1)  # without a model: each send brings the adapter
    worker = multiprocessing.get_context("spawn").Process(target=work, args=(scheme,))
    worker.start()
    with scheme:
        scheme.connect(processes=[worker])
        for _ in range(NUM_UPDATES):
            optimizer.zero_grad()
            model(torch.randn(16, 64)).square().mean().backward()
            optimizer.step()
            report = scheme.send(peft.get_peft_model_state_dict(model))
        everything = sum(each.nbytes for each in model.state_dict().values())
        print(f"each update had {report.nbytes} bytes, the whole model has {everything}")
    worker.join()


if __name__ == "__main__":
    main()
