"""Draws the pictures of these pages: ``python docs/pictures.py`` writes them to ``docs/pictures``.

Each is 400 units wide, so that its text can be read on a phone, and is drawn twice, for light and
for dark pages. The background is left to the page.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape
from pathlib import Path
from typing import Literal

WIDTH = 400
SIZE = 15
# Of a letter, in heights of a line: those of wide fonts, as the reader's is not known.
ROOM, CODE_ROOM = 0.58, 0.61
Role = Literal["page", "trainer", "memory", "slot", "worker"]

# By role: what fills a box, its frame, and the text in it.
LIGHT: dict[Role, tuple[str, str, str]] = {
    "page": ("#ffffff", "#57606a", "#24292f"),
    "trainer": ("#ddebff", "#1f5fbf", "#0b2e66"),
    "memory": ("#fff6dd", "#9a6700", "#5c3d00"),
    "slot": ("#ffe7a8", "#9a6700", "#4d3300"),
    "worker": ("#dcf5e3", "#1a7f37", "#0b4a1e"),
}
DARK: dict[Role, tuple[str, str, str]] = {
    "page": ("#131416", "#9aa4af", "#e6e9ed"),
    "trainer": ("#122b52", "#6cb0ff", "#dbeaff"),
    "memory": ("#2b2208", "#d9a93a", "#ffe9b3"),
    "slot": ("#4a3a0c", "#d9a93a", "#fff1cc"),
    "worker": ("#10351c", "#56d364", "#d5f7dc"),
}


class Picture:
    """Shapes in one palette; `svg` puts them together."""

    def __init__(self, palette: dict[Role, tuple[str, str, str]], height: int) -> None:
        self.palette = palette
        self.height = height
        self.shapes: list[str] = []

    def text(
        self,
        x: float,
        y: float,
        line: str,
        role: Role = "page",
        *,
        at: Literal["start", "middle", "end"] = "middle",
        room: float = WIDTH,
    ) -> None:
        """Write one line; a ``*`` in front of it makes it bold, backquotes make it code."""
        bold, code = line.startswith("*"), line.startswith("`")
        line = line.strip("*`")
        if len(line) * SIZE * (CODE_ROOM if code else ROOM) > room:
            raise ValueError(f"{line!r} does not fit into {room}")
        style = ' font-weight="bold"' * bold + ' font-family="ui-monospace, monospace"' * code
        self.shapes.append(
            f'<text x="{x:g}" y="{y:g}" text-anchor="{at}" fill="{self.palette[role][2]}"{style}>'
            f"{escape(line, quote=False)}</text>"
        )

    def box(self, x: float, y: float, width: float, height: float, role: Role, *lines: str) -> None:
        """Draw a box around lines that are centred in it."""
        fill, frame, _ = self.palette[role]
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="7" '
            f'fill="{fill}" stroke="{frame}" stroke-width="1.5"/>'
        )
        top = y + height / 2 - 10 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 20 * number, line, role, room=width)

    def arrow(self, role: Role, *points: tuple[float, float]) -> None:
        """Draw a line through points, with a head at the last one."""
        (x0, y0), (x, y) = points[-2:]
        length = ((x - x0) ** 2 + (y - y0) ** 2) ** 0.5
        ux, uy = (x - x0) / length, (y - y0) / length
        line = " ".join(f"{px:g},{py:g}" for px, py in (*points[:-1], (x - 6 * ux, y - 6 * uy)))
        head = " ".join(
            f"{x - 10 * ux + side * uy:.1f},{y - 10 * uy - side * ux:.1f}" for side in (5, -5)
        )
        colour = self.palette[role][1]
        self.shapes.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<polygon points="{x:g},{y:g} {head}" fill="{colour}"/>'
        )

    def notes(self, y: float, *lines: str) -> None:
        """Write lines across the picture."""
        for number, line in enumerate(lines):
            self.text(WIDTH / 2, y + 20 * number, line)

    def svg(self, title: str) -> str:
        """The whole file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
            f'width="{1.15 * WIDTH:g}" height="{1.15 * self.height:g}" role="img" '
            f'font-family="system-ui, sans-serif" font-size="{SIZE}">'
        )
        return "\n".join([head, f"<title>{escape(title)}</title>", *self.shapes, "</svg>\n"])


def overview(draw: Picture) -> str:
    """A trainer, two slots, three workers."""
    draw.box(90, 6, 220, 58, "trainer", "*trainer", "`await scheme.send()`")
    draw.box(6, 108, 388, 96, "memory")
    draw.text(20, 130, "*shared memory", "memory", at="start")
    draw.box(18, 142, 176, 48, "slot", "slot 0: version 7")
    draw.box(206, 142, 176, 48, "slot", "*slot 1: version 8")
    draw.arrow("trainer", (294, 64), (294, 142))
    draw.text(284, 91, "one copy for all workers", at="end")
    for number, (slot, *lines) in enumerate(
        [
            (106, "in a forward:", "version 7"),
            (256, "next forward:", "version 8"),
            (332, "next forward:", "version 8"),
        ]
    ):
        middle = 66 + 134 * number
        draw.box(middle - 60, 246, 120, 80, "worker", f"*worker {number}", *lines)
        draw.arrow("memory", (slot, 190), (middle if number != 1 else 225, 246))
    draw.notes(
        354,
        "Worker 0 ends its forward with version 7,",
        "and begins the next one with version 8.",
        "On other hosts each worker receives a copy.",
    )
    return "A trainer copies its weights into a slot of shared memory, which all workers read"


def update(draw: Picture) -> str:
    """What happens to an update from send() to its report."""
    left, right = 100, 300
    draw.text(left, 18, "*trainer")
    draw.text(right, 18, "*worker")
    draw.box(6, 30, 188, 62, "trainer", "*1 send", "`await scheme.send()`")
    draw.arrow("trainer", (left, 92), (left, 118))
    draw.box(6, 118, 188, 82, "trainer", "*2 snapshot", "one copy: version 8", "optimizers wait")
    draw.box(206, 30, 188, 170, "worker", "forwards", "use version 7")
    draw.arrow("trainer", (left, 200), (left, 228))
    draw.box(
        6,
        228,
        388,
        82,
        "slot",
        "*3 slot or wire",
        "slot: its number goes into the worker's page",
        "wire: the bytes, each chunk with a checksum",
    )
    draw.arrow("memory", (right, 310), (right, 336))
    draw.box(206, 336, 188, 82, "worker", "*4 stage", "check names, shapes,", "dtypes and bytes")
    draw.box(6, 336, 164, 82, "trainer", "training", "may go on")
    draw.arrow("worker", (right, 418), (right, 444))
    draw.box(206, 444, 188, 82, "worker", "*5 apply", "between two forwards:", "pointers change")
    draw.arrow("worker", (right, 526), (right, 552))
    draw.box(206, 552, 188, 62, "worker", "*6 acknowledge", "APPLIED, version 8")
    draw.arrow("worker", (206, 583), (170, 583))
    draw.box(6, 552, 164, 62, "trainer", "*report", "`report.acked`")
    draw.notes(
        642,
        "It does not fit: NACK, and version 7 stays.",
        "A newer one replaces it: SKIPPED.",
        "With slots most workers promise to look:",
        "4 to 6 then need no message.",
    )
    return "An update: send, snapshot, slot or wire, stage, apply, acknowledge"


def segment(draw: Picture) -> str:
    """Slots, pages, and who writes to which."""
    draw.box(6, 6, 388, 42, "trainer", "*trainer")
    draw.arrow("trainer", (98, 48), (98, 100))
    draw.text(110, 79, "1 copies", at="start")
    draw.arrow("trainer", (300, 48), (300, 100))
    draw.text(290, 79, "2 stores", at="end")
    draw.box(6, 100, 184, 204, "memory")
    draw.text(98, 124, "*segment", "memory")
    draw.box(20, 138, 156, 48, "slot", "slot 0: version 7")
    draw.box(20, 196, 156, 48, "slot", "*slot 1: version 8")
    draw.text(98, 270, "one lock", "memory")
    draw.text(98, 290, "for each slot", "memory")
    draw.box(222, 116, 172, 204, "memory")
    draw.box(206, 100, 172, 196, "memory")
    draw.text(292, 124, "*page of worker 0", "memory")
    draw.box(220, 138, 144, 42, "trainer", "want: slot 1")
    draw.box(220, 190, 144, 42, "worker", "holds: version 8")
    draw.box(220, 242, 144, 42, "worker", "bell: 0")
    draw.text(386, 313, "one for each worker", "memory", at="end")
    draw.arrow("memory", (98, 304), (98, 366))
    draw.text(110, 348, "maps", at="start")
    draw.arrow("worker", (214, 366), (214, 296))
    draw.text(226, 348, "reads want, stores", at="start")
    draw.box(6, 366, 388, 62, "worker", "*worker 0", "parameters are views of slot 1")
    draw.notes(454, "Blue is written by the trainer,", "green by the worker.")
    return "A segment of shared memory with two slots, and the page of a worker"


def handshake(draw: Picture) -> str:
    """What the two ends of a stream tell each other before the first update."""
    draw.box(6, 6, 150, 58, "worker", "*dialer", "a worker")
    draw.box(244, 6, 150, 58, "trainer", "*listener", "a trainer")
    draw.box(6, 74, 388, 36, "page", "TLS handshake, with tls=")
    draw.box(6, 120, 388, 256, "memory")
    draw.text(200, 142, "*a stranger: short headers, no payload", "memory")
    rows: list[tuple[int, Role, Role, str]] = [
        (174, "worker", "memory", "challenge: greeting"),
        (216, "trainer", "memory", "challenge: random number L"),
        (258, "worker", "memory", "proof: random number D, HMAC of both"),
        (300, "trainer", "memory", "proof: HMAC of both"),
        (342, "worker", "memory", "hello: role, model, what it has"),
        (408, "trainer", "page", "welcome: index, epoch, version"),
        (450, "trainer", "page", "manifest, updates"),
        (492, "worker", "page", "acknowledgements"),
    ]
    for y, sender, around, line in rows:
        ends = ((30, y + 8), (370, y + 8))
        draw.arrow(sender, *(ends if sender == "worker" else ends[::-1]))
        draw.text(200, y, line, around)
    draw.notes(
        532,
        "The key of each HMAC is the token,",
        "which never travels itself.",
        "10 s until the proof, 10 s until the hello.",
    )
    return "Handshake: TLS, challenge and proof from both sides, hello, welcome, updates"


def push_and_pull(draw: Picture) -> str:
    """A weight server between trainers and workers."""
    draw.box(90, 6, 220, 58, "trainer", "*trainer", "`await scheme.send()`")
    draw.arrow("trainer", (200, 64), (200, 116))
    draw.text(190, 94, "*push", at="end")
    draw.text(210, 94, "each version", at="start")
    draw.box(6, 116, 388, 104, "memory")
    draw.text(20, 142, "*weight server", "memory", at="start")
    draw.box(18, 156, 176, 48, "slot", "policy: version 8")
    draw.box(206, 156, 176, 48, "slot", "critic: version 3")
    draw.arrow("memory", (92, 220), (92, 296))
    draw.text(102, 252, "*follow", at="start")
    draw.text(102, 272, "each version", at="start")
    draw.arrow("worker", (258, 296), (258, 220))
    draw.arrow("memory", (282, 220), (282, 296))
    draw.text(292, 252, "*pull", at="start")
    draw.text(292, 272, "when it asks", at="start")
    draw.box(6, 296, 182, 82, "worker", "*worker", "subscribes,", "as by default")
    draw.box(212, 296, 182, 82, "worker", "*worker", "`subscribe=False`", "`scheme.pull()`")
    draw.notes(
        406,
        "Trainer and workers dial the server.",
        "It keeps the newest version of each model,",
        "so neither has to wait for the other.",
    )
    return "A trainer pushes to a weight server; workers follow it, or pull when they ask"


PICTURES: dict[str, tuple[Callable[[Picture], str], int]] = {
    "overview": (overview, 408),
    "update": (update, 716),
    "segment": (segment, 486),
    "handshake": (handshake, 586),
    "push-and-pull": (push_and_pull, 460),
}


def files() -> dict[str, str]:
    """Every file of ``docs/pictures``, by name."""
    made = {}
    for name, (drawing, height) in PICTURES.items():
        for ending, palette in (("", LIGHT), ("-dark", DARK)):
            picture = Picture(palette, height)
            title = drawing(picture)
            made[f"{name}{ending}.svg"] = picture.svg(title)
    return made


if __name__ == "__main__":
    folder = Path(__file__).with_suffix("")
    folder.mkdir(exist_ok=True)
    for name, text in files().items():
        (folder / name).write_text(text)
