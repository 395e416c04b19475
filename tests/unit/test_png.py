"""`skylite report --png` takes no settings from the working folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skylite.report.png import write_png_files

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


def test_a_single_step_is_a_point_in_the_middle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figure = pytest.importorskip("matplotlib.figure").Figure
    drawn: list[Any] = []
    save = figure.savefig

    def record(self: Any, *args: Any, **options: Any) -> None:
        drawn.append(self.axes[0])
        save(self, *args, **options)

    monkeypatch.setattr(figure, "savefig", record)
    plot = {
        "title": "Reward",
        "unit": "",
        "percent": False,
        "divisor": 1,
        "log": False,
        "keys": ["reward/mean"],
    }
    for steps, rewards in (([7], [0.3]), ([7, 8], [0.3, None])):
        run = {"label": "r", "held_out": [], "metrics": {"step": steps, "reward/mean": rewards}}
        write_png_files({"plots": [plot], "runs": [run]}, tmp_path)
    assert drawn[0].get_xlim() == (6, 8)
    low, high = drawn[0].get_ylim()
    assert low < 0.3 < high
    assert [axes.get_lines()[0].get_marker() for axes in drawn] == ["o", "o"]
    assert all(tick == int(tick) for axes in drawn for tick in axes.get_xticks())
