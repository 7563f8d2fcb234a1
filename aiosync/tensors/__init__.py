"""Tensors: from models to flat buffers and back.

``collect`` and :class:`Flattener` read a model; :class:`Layout` and :class:`FlatBuffer` hold
what travels; :class:`Target` puts it into another model. This package must never import asyncio
or a transport.
"""

from __future__ import annotations

from aiosync.tensors.apply import Target
from aiosync.tensors.buffer import FlatBuffer
from aiosync.tensors.copying import CopyPool, copy_bytes
from aiosync.tensors.dtypes import dtype_name, torch_dtype
from aiosync.tensors.layout import Layout
from aiosync.tensors.leaves import Leaf, Leaves, collect
from aiosync.tensors.live import LiveBytes
from aiosync.tensors.snapshot import Flattener, Prepared

__all__ = [
    "CopyPool",
    "FlatBuffer",
    "Flattener",
    "Layout",
    "Leaf",
    "Leaves",
    "LiveBytes",
    "Prepared",
    "Target",
    "collect",
    "copy_bytes",
    "dtype_name",
    "torch_dtype",
]
