"""``aiosync plan``: what a send between two sites takes, by arithmetic. Measures nothing."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from aiosync.cli._common import show_nbytes

__all__ = ["as_bits", "plan"]

_WIDTH = 100
_UNIT = re.compile(r"(\d+(?:\.\d+)?)\s*([kMGT]?)(i?)(B|bit)")
_BIT_WIDTHS = {"bf16": 16, "fp16": 16, "fp32": 32}


class _Speed(NamedTuple):
    """Figures of a busy machine for sends that change at most a share of the weights.

    ``docs/deltas.md`` has those of one that is not busy, about twice as fast.

    Attributes:
        density: That share.
        nbytes: Bytes of the delta for each changed weight.
        encode: GB of weights, changed or not, that one core encodes in a second.
        decode: GB of weights that one core decodes in a second.
    """

    density: float
    nbytes: float
    encode: float
    decode: float


_SPEEDS = (
    _Speed(0.001, 2.4, 2.36, 2.92),
    _Speed(0.01, 1.4, 1.43, 2.45),
    _Speed(0.03, 1.3, 0.61, 1.33),
    _Speed(0.10, 1.0, 0.38, 0.99),
    _Speed(0.30, 0.8, 0.34, 0.48),
    _Speed(0.60, 0.7, 0.17, 0.27),
    _Speed(1.00, 0.7, 0.15, 0.35),
)


def _quantity(text: str, unit: str, example: str) -> float:
    """Return the number of units (``B`` or ``bit``) in a text; an error shows the example."""
    found = _UNIT.fullmatch(text.strip())
    if found is None or found[4] != unit or not float(found[1]):
        raise typer.BadParameter(f"{text!r} is no such quantity: write for instance {example}")
    step = 1024 if found[3] else 1000
    return float(found[1]) * float(step ** " kMGT".index(found[2] or " "))


def _nbytes(text: str) -> float:
    """Return the number of bytes in a text such as ``16GB``."""
    return _quantity(text, "B", "16GB or 512MiB")


def as_bits(text: str) -> float:
    """Return the number of bits in a text such as ``1Gbit``."""
    return _quantity(text, "bit", "1Gbit or 100Mbit")


def _share(text: str) -> float:
    """Return the share in a text such as ``2%``: above 0, at most 1."""
    share = re.fullmatch(r"(\d+(?:\.\d+)?)%", text.strip())
    if share is None or not 0 < float(share[1]) <= 100:
        raise typer.BadParameter(f"{text!r} is no share: write for instance 2%")
    return float(share[1]) / 100


def plan(
    size: Annotated[
        float, typer.Option(parser=_nbytes, metavar="SIZE", help="Bytes of the weights: 16GB.")
    ],
    bandwidth: Annotated[
        float,
        typer.Option(
            parser=as_bits, metavar="RATE", help="Bits a second that leave the trainer: 1Gbit."
        ),
    ],
    workers: Annotated[int, typer.Option(min=1, help="Workers at the other site.")] = 1,
    density: Annotated[
        float,
        typer.Option(parser=_share, metavar="SHARE", help="Weights that a send has changed."),
    ] = "2%",  # type: ignore[assignment]  # the parser reads it
    dtype: Annotated[str, typer.Option(metavar="bf16|fp16|fp32", help="Of the weights.")] = "bf16",
) -> None:
    """Say what a send takes: whole, as a delta, or through a weight server near the workers.

    Arithmetic with the speeds of a busy machine, about half of those in docs/deltas.md. Nothing is
    measured or sent.

    - `aiosync plan --size 16GB --bandwidth 1Gbit --workers 64 --density 2%`
    """
    if dtype not in _BIT_WIDTHS:
        raise typer.BadParameter(f"{dtype!r}: write bf16, fp16 or fp32", param_hint="--dtype")
    # Seconds that one copy of all weights takes on the wire.
    wire = size * 8 / bandwidth
    ways = [
        ("whole, to each worker", size * workers, wire * workers, "nothing"),
        ("whole, by `aiosync serve` near them", size, wire, "one copy at the server"),
    ]
    if _BIT_WIDTHS[dtype] == 16:
        speed = next(each for each in _SPEEDS if each.density >= density)
        encoded = size / 2 * density * speed.nbytes
        slowest = size / 1e9 / min(speed.encode, speed.decode)
        seconds = max(wire * encoded / size * workers, slowest)
        ways.append(('delta="auto", to each worker', encoded * workers, seconds, "one copy a side"))
    console = Console(highlight=False, width=_WIDTH)
    console.print(_as_table(ways))
    best = min(ways, key=lambda way: way[2])
    console.print(f"\nThe soonest: {best[0]}.", markup=False)
    if _BIT_WIDTHS[dtype] == 32:
        console.print("Nearly every weight in fp32 changes, so a delta saves little: see bf16.")


def _as_table(ways: Iterable[tuple[str, float, float, str]]) -> Table:
    """Return the ways to send as a table: name, bytes, seconds and memory of each."""
    table = Table("a send", "leaves the trainer", "seconds", "memory beside", box=None)
    for name, nbytes, seconds, memory in ways:
        shown = f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"
        table.add_row(name, show_nbytes(nbytes), shown, memory)
    return table
