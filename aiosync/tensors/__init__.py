"""Tensors: from models to flat buffers and back.

``collect`` and :class:`Flattener` read a model; :class:`Layout` and :class:`FlatBuffer` hold the
weights that travel; :class:`Target` puts them into another model. :func:`gather_weights` puts
sharded tensors together, and a :class:`WeightMap` turns weights into those of another model, with
its names. This package must never import asyncio or a transport.
"""

from aiosync.tensors.apply import Target
from aiosync.tensors.buffer import FlatBuffer, Layout
from aiosync.tensors.copying import CopyPool, copy_bytes, copy_pieces
from aiosync.tensors.dtypes import torch_dtype
from aiosync.tensors.flatten import (
    Flattener,
    LiveBytes,
    Prepared,
)
from aiosync.tensors.mapping import Dtypes, WeightMap, check_dtypes
from aiosync.tensors.sharded import gather_weights
from aiosync.tensors.walk import Leaf, Leaves, collect, lacks_memory

__all__ = [
    "CopyPool",
    "Dtypes",
    "FlatBuffer",
    "Flattener",
    "Layout",
    "Leaf",
    "Leaves",
    "LiveBytes",
    "Prepared",
    "Target",
    "WeightMap",
    "check_dtypes",
    "collect",
    "copy_bytes",
    "copy_pieces",
    "gather_weights",
    "lacks_memory",
    "torch_dtype",
]
