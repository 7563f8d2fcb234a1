"""Weight updates in an async server: requests and updates take turns on the server's event loop.

:class:`AdmissionGate` keeps a switch of weights out of running requests; :class:`WeightFeed`
receives updates in the background and switches to them under a gate. See
``docs/topics/serving.md``. Must not import a web framework, nor anything of
``aiosync.integrations``.
"""

from aiosync.serving.feed import WeightFeed
from aiosync.serving.gate import Admission, AdmissionGate, Swap
from aiosync.serving.status import FeedStatus

__all__ = ["Admission", "AdmissionGate", "FeedStatus", "Swap", "WeightFeed"]
