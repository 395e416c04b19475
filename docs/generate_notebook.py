"""Write examples/custom_loop.ipynb from custom_loop.py, whose cells begin with `# %%`.

    python docs/generate_notebook.py        (or: make docs-reference)
    python docs/generate_notebook.py --check        writes nothing, fails if the notebook is stale

The script is what a test runs.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from write_or_check import write_or_check

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "custom_loop.py"
CELL, PROSE = "# %%", " [markdown]"


def notebook(script: str) -> str:
    """The script as a notebook without outputs."""
    cells = [cell(number, *part.split("\n", 1)) for number, part in enumerate(script.split(CELL)[1:])]
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    found = {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def cell(number: int, kind: str, text: str) -> dict[str, Any]:
    """A cell of the notebook's format. `kind`: what stands after CELL."""
    lines = text.strip().splitlines()
    if kind == PROSE:
        lines = [line.removeprefix("#").removeprefix(" ") for line in lines]
    common = {"id": f"cell-{number:02}", "metadata": {}, "source": "\n".join(lines).splitlines(keepends=True)}
    if kind == PROSE:
        return {"cell_type": "markdown", **common}
    return {"cell_type": "code", "execution_count": None, "outputs": [], **common}


if __name__ == "__main__":
    write_or_check({SCRIPT.with_suffix(".ipynb"): notebook(SCRIPT.read_text(encoding="utf-8"))}, __doc__)
