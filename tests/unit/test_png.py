"""`skylite report --png` takes no settings from the working folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

CODE = """
from pathlib import Path
from skylite.report.png import write_png_files
plot = {"title": "Reward", "unit": "",
        "percent": False, "divisor": 1.0, "log": False, "keys": ["reward/mean"]}
run = {"label": "r", "held_out": [], "metrics": {"step": [1, 2], "reward/mean": [0.1, 0.2]}}
print(write_png_files({"plots": [plot], "runs": [run]}, Path("png"))[0])
import matplotlib
print(matplotlib.rcParams["text.usetex"], matplotlib.get_backend())
"""


def test_a_matplotlibrc_of_the_working_folder_has_no_effect(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    (tmp_path / "matplotlibrc").write_text("text.usetex: True\nbackend: TkAgg\n")
    done = subprocess.run(
        [sys.executable, "-c", CODE], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["png/reward.png", "False Agg"]
    assert (tmp_path / "png" / "reward.png").read_bytes().startswith(b"\x89PNG")
