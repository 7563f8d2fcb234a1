"""Pictures of the built documentation, for a look by hand: front page, a pattern and an example.

Run ``sphinx-build -b html docs SITE``, then ``python -m tests.bench.docs_pictures SITE FOLDER``.
Name other pages behind it if you want those, such as ``reference/schemes/tcp``. Each page is taken
in light, in dark, and as wide as a phone. Needs ``chromium``.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_DESK, _PHONE = (1280, 1800), (390, 2600)
_LOOKS = {
    "light": (_DESK, ()),
    "dark": (_DESK, ("--force-dark-mode",)),
    "phone": (_PHONE, ()),
    "phone-dark": (_PHONE, ("--force-dark-mode",)),
}


def pages(site: Path, names: Sequence[str]) -> dict[str, Path]:
    """Return pages by name; by default the front page, the first pattern and the first example."""
    if names:
        return {name.replace("/", "-"): site / f"{name}.html" for name in names}
    found = {"front": site / "index.html"}
    for name in ("patterns", "examples"):
        below = sorted((site / name).glob("*.html"))
        found[name] = next(page for page in below if page.stem != "index")
    return found


def photograph(page: Path, file: Path, size: tuple[int, int], *options: str) -> None:
    """Take a picture of a page with Chromium.

    The page is in a frame, as Chromium's own windows are never as narrow as a phone.
    """
    width, height = size
    with tempfile.TemporaryDirectory() as place:
        frame = Path(place) / "frame.html"
        frame.write_text(
            "<style>body { margin: 0 } iframe { border: 0; width: 100% }</style>"
            f'<iframe src="{page.absolute().as_uri()}" '
            f'style="width: {width}px; height: {height}px"></iframe>'
        )
        subprocess.run(
            [
                *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
                *(f"--user-data-dir={place}/profile", f"--window-size={max(width, 500)},{height}"),
                *(f"--screenshot={file.absolute()}", "--virtual-time-budget=3000", *options),
                frame.as_uri(),
            ],
            check=True,
            timeout=120,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )


def main(site: Path, folder: Path, names: Sequence[str]) -> None:
    """Take all pictures."""
    folder.mkdir(exist_ok=True)
    for name, page in pages(site, names).items():
        for look, (size, options) in _LOOKS.items():
            file = folder / f"{name}-{look}.png"
            photograph(page, file, size, *options)
            print(f"{file} shows {page.relative_to(site)}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
