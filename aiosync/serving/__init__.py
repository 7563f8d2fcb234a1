"""Weights inside an async server: requests and updates in turn, on the server's own event loop.

:class:`AdmissionGate` keeps a switch of weights out of running requests; :class:`WeightFeed`
receives in the background and switches under a gate. See ``docs/topics/serving.md``. Must not
import a web framework, nor anything of ``aiosync.integrations``.
"""

from aiosync.serving.feed import FeedStatus, WeightFeed
from aiosync.serving.gate import Admission, AdmissionGate, Swap

__all__ = ["Admission", "AdmissionGate", "FeedStatus", "Swap", "WeightFeed"]
