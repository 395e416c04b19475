"""The examples: the notebook on the fake engine with torchrun, the warm start as far as the dry run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.project import COMMAND
from tests.unit.doc_blocks import ROOT, blocks

NOTEBOOK = ROOT / "examples" / "quickstart.ipynb"
TINY = (
    "--set rollout.prompts_per_step=2 --group-size 4 --set eval.limit=0 --set engine.kv_cache_gib=0.25 "
    "--set rollout.max_prompt_tokens=900 --set rollout.max_completion_tokens=12 --set engine.max_num_seqs=8 "
    "--lr 1e-2 --set algorithm.entropy_coef=0.1 --set sync.rollout_mismatch=warn"
)
"""A random model solves no problem: the entropy bonus gives it a gradient."""


def code_cells() -> list[tuple[str, list[str]]]:
    """Source and tags of the notebook's code cells."""
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    return [
        ("".join(cell["source"]), cell["metadata"].get("tags", []))
        for cell in cells
        if cell["cell_type"] == "code"
    ]


def run_cell(source: str, names: dict[str, Any]) -> str:
    """Run a cell as Jupyter does: `!` lines in a shell with {NAME} filled in. Returns what it prints."""
    printed = io.StringIO()
    if source.startswith("!"):
        done = subprocess.run(
            source.removeprefix("!").format(**names), shell=True, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{source}\n{done.stdout}{done.stderr}"
        return done.stdout
    with contextlib.redirect_stdout(printed):
        exec(source, names)
    return printed.getvalue()


@pytest.mark.e2e
@pytest.mark.dist
@pytest.mark.usefixtures("fake_engine")
def test_the_notebook(tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", os.environ["PATH"])
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict[str, Any] = {}
    printed = []
    for source, tags in code_cells():
        printed.append(run_cell(source, names))
        if "parameters" in tags:
            names |= {"MODEL": str(tiny_llama), "SETTINGS": TINY}
    assert [step["step"] for step in names["run"].metrics.to_pylist()] == [1, 2, 3]
    assert len(names["axes"]) == len(names["names"])
    assert names["moved"] > 0
    assert sum("reward " in text for text in printed) >= 1


def test_the_notebook_is_stored_without_output() -> None:
    cells = json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]
    assert all(c["outputs"] == [] and c["execution_count"] is None for c in cells if c["cell_type"] == "code")


@pytest.mark.e2e
def test_the_warm_start(tiny_llama: Path, tmp_path: Path) -> None:
    """The README's own commands, with a tiny model and two steps of SFT."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    folder = tmp_path / "examples" / "warm_start"
    given = [b for b in blocks(ROOT / "examples/warm_start/README.md") if "test_examples.py" in b.note]
    for line in [line for block in given for line in block.commands if not line.startswith("cd ")]:
        words = [str(tiny_llama) if word == "smollm2-135m" else word for word in shlex.split(line)]
        if words[0] == "python":
            argv = [sys.executable, *words[1:], "--steps", "2"]
        else:
            argv = [*COMMAND, *words[1:]]
            argv += ["--model", str(tiny_llama), "--dry-run"] if words[1] == "train" else []
        done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    assert "warm start from" in done.stderr + done.stdout
    assert (folder / "sft-adapter" / "adapter_model.safetensors").is_file()
