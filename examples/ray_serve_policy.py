"""Shows a policy in Ray Serve that follows a trainer, and says which version each answer is of.

pip install torch==2.13.0 -e '.[ray-serve]'  # once it is released: 'aiosync[ray-serve]'
python examples/ray_serve_policy.py
"""

import asyncio
import secrets

import ray
import torch
from ray import serve
from ray.serve.handle import DeploymentHandle

import aiosync
from aiosync.integrations.ray_serve import Answer, WeightsMixin, admitted

TOKEN = secrets.token_urlsafe()


@serve.deployment(
    num_replicas=2,
    ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": {"AIOSYNC_TOKEN": TOKEN}}},
)
class Policy(WeightsMixin):
    async def __init__(self, trainer: str) -> None:
        self.policy = torch.nn.Linear(4, 2)
        await self.follow_weights(trainer, model=self.policy)  # no requests before this

    @admitted
    async def act(self, observation: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            return self.policy(observation)


async def ask(handle: DeploymentHandle, observation: torch.Tensor, answers: list[Answer]) -> None:
    while True:
        answers.append(await handle.act.remote(observation))


async def main() -> None:
    policy = torch.nn.Linear(4, 2)
    trainer = aiosync.TCPWeightSyncScheme("tcp://127.0.0.1:0", token=TOKEN)
    trainer.init_on_sender(model=policy)
    async with trainer:
        await trainer.connect()
        app = Policy.bind(trainer.address)
        await asyncio.to_thread(serve.run, app, name="policy", route_prefix=None)
        handle = serve.get_app_handle("policy")

        observation = torch.ones(4)
        expected = {trainer.version: policy(observation).detach()}
        answers: list[Answer] = []
        asking = asyncio.create_task(ask(handle, observation, answers))  # during the updates
        for _ in range(20):
            with torch.no_grad():
                policy.weight.add_(0.1)
            expected[trainer.version + 1] = policy(observation).detach()
            report = await trainer.send()
            await asyncio.sleep(0.05)
        asking.cancel()
        print(f"version {report.version} applied by {sorted(report.acked)}")

        last = await handle.act.remote(observation, min_version=report.version)
        print(f"asked for version {report.version}, got an answer of version {last.version}")
        answers.append(last)
        assert all(torch.equal(each.value, expected[each.version]) for each in answers)
        versions = {each.version for each in answers}
        print(
            f"{len(answers)} answers of {len(versions)} versions, each as the trainer computes it"
        )
        await asyncio.to_thread(serve.delete, "policy")


if __name__ == "__main__":
    ray.init(include_dashboard=False, configure_logging=False, log_to_driver=False)
    serve.start(proxy_location="Disabled")
    asyncio.run(main())
    ray.shutdown()
