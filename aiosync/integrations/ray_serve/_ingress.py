"""The ASGI middleware for an ingress of Ray Serve, which is made before its replica is.

Must not import starlette.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from ray import serve

from aiosync.errors import LocalProtocolError
from aiosync.integrations.asgi import WeightsMiddleware
from aiosync.integrations.ray_serve._replica import WeightsMixin

__all__ = ["ReplicaWeightsMiddleware"]


class ReplicaWeightsMiddleware:
    """:class:`aiosync.integrations.asgi.WeightsMiddleware` for ``@serve.ingress(app)``.

    ::

        app = FastAPI()
        app.add_middleware(ReplicaWeightsMiddleware)

        @serve.deployment
        @serve.ingress(app)
        class Policy(WeightsMixin): ...

    The app is made, and pickled, before there is a replica; so this finds the feed of its
    replica by itself when the first request comes.

    Args:
        app: The application inside.
        options: As for :class:`aiosync.integrations.asgi.WeightsMiddleware`, without ``feed``.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], **options: Any) -> None:
        self._app = app
        self._options = options
        self._inner: Callable[..., Awaitable[None]] | None = None

    async def __call__(
        self,
        scope: MutableMapping[str, Any],
        receive: Callable[..., Any],
        send: Callable[..., Any],
    ) -> None:
        """Serve one connection; ASGI 3."""
        if scope["type"] == "lifespan":  # the feed is that of the replica, and started by it
            await self._app(scope, receive, send)
            return
        if self._inner is None:
            replica: Any = serve.get_replica_context().servable_object
            if not isinstance(replica, WeightsMixin):
                raise LocalProtocolError(f"{type(replica).__name__} is not a WeightsMixin")
            self._inner = WeightsMiddleware(self._app, replica.weight_feed, **self._options)
        await self._inner(scope, receive, send)
