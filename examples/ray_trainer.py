"""Shows a trainer that sends its weights to Ray actors, which go on serving meanwhile.

pip install 'aiosync[ray]'
python examples/ray_trainer.py
"""

import asyncio

import ray
import torch

from aiosync import RayWeightSyncScheme


@ray.remote(num_cpus=0)
class Worker:
    """An asynchronous actor: updates arrive beside the calls that it serves."""

    async def join(self, scheme: RayWeightSyncScheme, idx: int) -> int:
        self.policy = torch.nn.Linear(4, 2)
        self.scheme = scheme
        scheme.init_on_receiver(model_id="policy", model=self.policy, worker_idx=idx)
        await scheme.connect()
        return scheme.version

    async def act(self, observation: torch.Tensor) -> tuple[int, torch.Tensor]:
        with torch.no_grad():
            return self.scheme.version, self.policy(observation)


async def main() -> None:
    policy = torch.nn.Linear(4, 2)
    workers = [Worker.remote() for _ in range(2)]
    async with RayWeightSyncScheme() as scheme:
        scheme.init_on_sender(model_id="policy", model=policy, num_workers=len(workers))
        joining = [worker.join.remote(scheme, idx) for idx, worker in enumerate(workers)]
        await scheme.connect()
        await asyncio.gather(*joining)
        for _ in range(3):
            with torch.no_grad():
                policy.weight.add_(0.1)
            report = await scheme.send()
            answers = await asyncio.gather(*(w.act.remote(torch.ones(4)) for w in workers))
            expected = policy(torch.ones(4)).detach()
            assert all(torch.equal(action, expected) for _, action in answers)
            print(f"version {report.version}: workers have {[v for v, _ in answers]}")


if __name__ == "__main__":
    ray.init(include_dashboard=False, configure_logging=False)
    asyncio.run(main())
    ray.shutdown()
