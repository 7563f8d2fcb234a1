"""Shows Ray actors: a trainer sends its weights to them while they serve calls.

Run it with `python examples/ray_actors.py`; it needs ray, and starts a cluster of its own.
"""

import asyncio

import ray
import torch
from torch import nn

import aiosync


@ray.remote(num_cpus=0)
class Worker:
    """An asynchronous actor: updates arrive beside the calls that it serves."""

    async def join(self, scheme, idx):
        self.policy = nn.Linear(4, 1, bias=False)
        self.scheme = scheme
        scheme.init_on_receiver(model_id="policy", model=self.policy, worker_idx=idx)
        await scheme.connect()
        return scheme.version

    async def act(self, observation):
        with self.scheme.reading() as read:  # one version, and its number
            return read.version, self.policy(observation).item()


async def main():
    policy = nn.Linear(4, 1, bias=False)
    workers = [Worker.remote() for _ in range(2)]
    async with aiosync.RayWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=len(workers))
        joining = [worker.join.remote(scheme, idx) for idx, worker in enumerate(workers)]
        await scheme.connect()
        print(f"the actors have joined, with versions {await asyncio.gather(*joining)}")
        for step in (1.0, 2.0, 3.0):
            nn.init.constant_(policy.weight, step)  # stands for an optimizer step
            report = await scheme.send()
            answers = await asyncio.gather(*(each.act.remote(torch.ones(4)) for each in workers))
            print(f"version {report.version}: the actors answer {answers}")


if __name__ == "__main__":
    ray.init(include_dashboard=False, configure_logging=False, log_to_driver=False)
    asyncio.run(main())
    ray.shutdown()  # after the scheme has closed
