"""The worker's runtime: it receives updates of one model, and applies them.

=============================================  =================================================
messages of the trainer, and answers to it     ``receiver``, ``answers``
an update that arrives                         ``update_reader``, ``kept_base``, ``transformer``
the order in which the model takes updates     ``applier``, ``turns``; the model itself: ``model``
reads, which updates never interrupt           ``guard``, ``reads``, ``forwards``, ``copies``
versions that reads take without an answer     ``promise``
an update that does not fit                    ``model`` returns the error of ``tensors.matching``,
                                               ``applier`` keeps the old version, ``receiver``
                                               tells the trainer
calls that wait for a version                  ``waits``, ``read_versions``
a lost trainer                                 ``outage``
=============================================  =================================================
"""
