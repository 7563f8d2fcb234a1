"""ASGI middleware that answers vLLM's weight-transfer contract for a model or a server of your own.

:class:`FourPhaseMiddleware` answers the paths with which trainers control vLLM's server, and makes
the model behind it an aiosync receiver. Requests of the application and switches of the weights
take turns at a gate. Written for the contract of vLLM 0.32; see ``docs/topics/four-phase.md``. Must
not import vLLM, nor a web framework.
"""

from aiosync.integrations.four_phase._middleware import FourPhaseMiddleware

__all__ = ["FourPhaseMiddleware"]
