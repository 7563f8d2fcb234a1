"""Ray Serve: each replica of a deployment keeps its model on the newest version.

:class:`WeightsMixin` gives a deployment a :class:`~aiosync.serving.WeightFeed` on the event loop
on which Serve runs its code; :func:`admitted` makes a method answer with the version that it
computed with; :class:`ReplicaWeightsMiddleware` does the same for an ingress. See
``docs/topics/ray-serve.md``. Needs ``ray[serve]``. Must not be imported by the rest of aiosync.
"""

from __future__ import annotations

from aiosync.integrations.ray_serve._admitted import Answer, admitted
from aiosync.integrations.ray_serve._ingress import ReplicaWeightsMiddleware
from aiosync.integrations.ray_serve._replica import TOKEN_VARIABLE, WeightsMixin

__all__ = ["TOKEN_VARIABLE", "Answer", "ReplicaWeightsMiddleware", "WeightsMixin", "admitted"]
