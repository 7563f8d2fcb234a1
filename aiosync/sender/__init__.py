"""The trainer's side at run time: snapshots, links to the workers, and sends.

=============================================  =================================================
a send, its deadline and its report            ``sender``; the outcomes of a version: ``outbox``
a send that is cancelled                       ``sender``; bytes of it on a link:
                                               ``transports.framed_link``
copies of the weights                          ``snapshots``, ``steps``
a link to a worker                             ``worker_link``, ``update_chunks``, ``deltas``
workers that join                              ``admission``, ``expected_workers``
workers, connected or not                      ``registry``, ``worker_record``
a worker that dies                             ``worker_deaths``, ``transports.framed_link``
updates for slow workers, and for later ones   ``update_queue``
calls that wait for workers                    ``waits``
=============================================  =================================================
"""

from aiosync.sender.registry import WorkerRegistry
from aiosync.sender.sender import WeightSender
from aiosync.sender.snapshots import How, Snapshot, SnapshotCopier
from aiosync.sender.update_chunks import Streaming

__all__ = [
    "How",
    "Snapshot",
    "SnapshotCopier",
    "Streaming",
    "WeightSender",
    "WorkerRegistry",
]
