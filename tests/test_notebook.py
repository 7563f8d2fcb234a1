"""The notebook of the examples: it runs in a kernel, and prints the output that is stored in it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

NOTEBOOK = Path(__file__).parents[1] / "examples" / "notebook.ipynb"
RUN = """
import sys
import nbclient, nbformat
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=50, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""


def _printed(notebook: Path) -> list[str]:
    cells: list[dict[str, Any]] = json.loads(notebook.read_text())["cells"]
    outputs = [output for cell in cells for output in cell.get("outputs", ())]
    return ["".join(output["text"]) for output in outputs]


@pytest.mark.apart
@pytest.mark.slow
@pytest.mark.timeout(120)
def test_the_notebook_prints_what_stands_in_it(tmp_path: Path) -> None:
    done = tmp_path / "done.ipynb"
    subprocess.run(
        [sys.executable, "-c", RUN, NOTEBOOK, done],
        check=True,
        # The notebook writes a module into this folder.
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
    )
    assert _printed(done) == _printed(NOTEBOOK)
    assert len(_printed(done)) == 5
