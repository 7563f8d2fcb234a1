"""Which versions the tokens of an answer come from, as vLLM reports it.

vLLM names weights by labels; those of :class:`AiosyncTrainerEngine` are ``7@0123456789abcdef``, a
version and the epoch that it is of. Must not import vLLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aiosync.spans import VersionSpan

__all__ = ["label_of", "span_of"]


def label_of(version: int, epoch: int) -> str:
    """How vLLM calls a version."""
    return f"{version}@{epoch:016x}"


def span_of(output: Any) -> VersionSpan | None:
    """The versions of an answer, and of how many of its tokens each is.

    Args:
        output: A finished ``CompletionOutput`` of vLLM, as in ``request_output.outputs``; or a
            choice of its server's ``/inference/v1/generate``, the last one of a stream.

    Returns:
        The span, with runs of (version, tokens). Of version 0 are tokens of weights that no trainer
        has sent, such as those that the engine was started with, and of another trainer than that
        of the last token. ``None`` if the answer names no version: it has no token, or is not
        finished.
    """
    spans = output.get("weight_versions") if isinstance(output, Mapping) else output.weight_versions
    if not spans:
        return None
    parts = [each if isinstance(each, Mapping) else vars(each) for each in spans]
    last = parts[-1]["version"].partition("@")[2]
    runs = list[tuple[int, int]]()
    for part in parts:
        version, _, epoch = part["version"].partition("@")
        known = version.isdecimal() and epoch == last
        runs.append((int(version) if known else 0, part["end"] - part["start"]))
    return VersionSpan.from_runs(runs, last or None)
