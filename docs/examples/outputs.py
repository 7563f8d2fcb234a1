"""Puts what the examples print into their pages.

    python docs/examples/outputs.py [PAGE...]

A page shows an output in the fence after a comment: `<!-- output of examples/NAME.py -->`, or
`<!-- output of these commands -->` after a block of `sh` commands. If another block has the command
`aiosync serve`, that server runs meanwhile. `tests/test_examples.py` compares the
pages with what is printed now, by the same functions.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SECONDS = 300.0
PORT = "7000"  # of the pages; commands run with a free one in its place

PROGRAM = re.compile(r"<!-- output of (examples/\w+\.py) -->\n```text\n(.*?)```\n", re.DOTALL)
COMMANDS = re.compile(
    r"```sh\n((?:(?!```).)*)```\n\n<!-- output of these commands -->\n```text\n(.*?)```\n",
    re.DOTALL,
)
SERVER = re.compile(r"```sh\n((?:(?!```).)*aiosync serve (?:(?!```).)*)```\n", re.DOTALL)

# What differs from run to run.
MASKS = (
    (r"epoch [0-9a-f]{16}\b|epoch \d+", "epoch E"),
    (r"127\.0\.0\.1:\d+", "127.0.0.1:PORT"),
    (r"(reward|mean return) \d+(\.\d+)?", r"\1 N"),
    (r"\d+(\.\d+)? (ms|s|MB/s)\b", r"N \2"),
)


def masked(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, instead in MASKS:
        text = re.sub(pattern, instead, text)
    return text


def pages() -> list[Path]:
    """The pages that show an output."""
    return sorted(page for page in HERE.glob("*.md") if "<!-- output of " in page.read_text())


def outputs(page: Path) -> list[tuple[str, str]]:
    """What a page shows: a program or commands, and their output."""
    text = page.read_text()
    return PROGRAM.findall(text) + COMMANDS.findall(text)


def run(page: Path, what: str) -> str:
    """Run a program of an example, or the commands of a page; what they print."""
    folder = Path(sys.executable).parent
    path = os.pathsep.join([str(folder), os.environ.get("PATH", "")])
    env = {key: value for key, value in os.environ.items() if key != "AIOSYNC_TOKEN"}
    env |= {"PATH": path, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1", "NO_COLOR": "1"}
    if what.startswith("examples/"):
        return _finish([sys.executable, str(ROOT / what)], env, ROOT)
    found = SERVER.search(page.read_text())
    with tempfile.TemporaryDirectory() as folder:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        script = ["bash", "-ec", what.replace(PORT, port)]
        if found is None:
            return _finish(script, env, Path(folder))
        server = subprocess.Popen(
            [
                "bash",
                "-ec",
                found[1].replace(PORT, port).replace("aiosync serve", "exec aiosync serve"),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            cwd=folder,
            env=env,
        )
        with server:
            try:
                assert server.stdout is not None
                server.stdout.readline()  # its address: it serves
                return _finish(script, env, Path(folder)).replace(port, PORT)
            finally:
                server.terminate()


def _finish(command: list[str], env: dict[str, str], folder: Path) -> str:
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=SECONDS,
        check=False,
        cwd=folder,
        env=env,
    )
    if done.returncode:
        raise RuntimeError(
            f"{command[-1]} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def main(names: list[str]) -> None:
    """Run all that the named pages show, or all pages, and write what it printed."""
    for page in [HERE / Path(name).name for name in names] or pages():
        for what, before in outputs(page):
            after = run(page, what)
            if masked(after) == masked(before):
                continue
            text = page.read_text()
            head, _, rest = text.partition(what)
            page.write_text(
                head + what + rest.replace(f"```text\n{before}```", f"```text\n{after}```", 1)
            )
            sys.stdout.write(f"{page.name}: {what.splitlines()[0]}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
