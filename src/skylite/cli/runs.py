"""List runs and their results, the newest first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from skylite.cli.options import RUNS, AsJson
from skylite.errors import ConfigError
from skylite.report.read_run import age_text, read_facts
from skylite.report.summary import damaged, summary
from skylite.ui.logs import show
from skylite.untrusted_text import plain

CONFIG_NAME = "config.json"
HEADS = ("run", "state", "steps", "model", "algorithm", "reward", "held-out", "time", "age", "findings")


def runs(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder with runs, or one run.", show_default="runs")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print a line per run. A damaged run is a line, too."""
    nothing_yet = folder is None and not RUNS.exists()
    folder = folder or RUNS
    found = [] if nothing_yet else [facts_of(path) for path in run_folders(folder)]
    found.sort(key=lambda facts: str(facts.get("updated_at") or ""), reverse=True)
    if as_json:
        show(json.dumps(found))
        return
    if not found:
        where = f"There is no folder {folder} here" if nothing_yet else f"{folder} holds no run"
        show(f"{where}. `skylite train` makes one; for runs elsewhere: skylite runs FOLDER.")
        return
    for line in table([HEADS, *map(row_of_any, found)]):
        show(line)


def run_folders(folder: Path) -> list[Path]:
    """`folder` itself if it is a run, else the runs directly in it. Raises ConfigError if it is no folder."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is not a folder.", "Give a folder with runs, such as runs.")
    if (folder / CONFIG_NAME).is_file():
        return [folder]
    return sorted(path for path in folder.iterdir() if (path / CONFIG_NAME).is_file())


def facts_of(path: Path) -> dict[str, Any]:
    try:
        return summary(read_facts(path)) | {"name": path.name}
    except Exception as error:  # noqa: BLE001 one bad run must not hide the others
        return damaged(path.name, str(path), error)


def row_of_any(facts: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a run, whatever numbers it has."""
    try:
        return row(facts)
    except Exception as error:  # noqa: BLE001 one bad run must not hide the others
        return row(damaged(facts["name"], facts["path"], error))


def row(facts: dict[str, Any]) -> tuple[str, ...]:
    """The cells of a run."""
    if facts["phase"] == "damaged":
        return (facts["name"], "damaged", facts["unreadable"][0], *[""] * (len(HEADS) - 3))
    return (
        facts["name"],
        facts["phase"],
        f"{facts['steps']}/{facts['num_steps']}",
        facts["model"],
        f"{facts['algorithm']} r{facts['rank']}",
        _change(facts["reward_first"], facts["reward_last"], ".2f"),
        held_out_change(facts["held_out_first"], facts["held_out_last"]),
        age_text(facts["step_seconds"]) if facts["step_seconds"] else "-",
        "-" if facts["age_seconds"] is None else age_text(facts["age_seconds"]),
        ", ".join(dict.fromkeys(a["kind"] for a in facts["alarms"])) or "-",
    )


def table(rows: list[tuple[str, ...]]) -> list[str]:
    """Lines with columns as wide as their longest cell. The message of a damaged run widens no column."""
    cells = [[plain(cell) for cell in cells] for cells in rows]
    sizes = [max(len(c[k]) for c in cells if k < 2 or c[1] != "damaged") for k in range(len(HEADS))]
    return ["  ".join(cell.ljust(size) for cell, size in zip(c, sizes, strict=True)).rstrip() for c in cells]


def held_out_change(first: dict[str, Any] | None, last: dict[str, Any] | None) -> str:
    """An accuracy in percent, a mean reward as it is."""
    found = [score for score in (first, last) if score is not None]
    is_accuracy = all(score["is_binary"] for score in found)
    means = [float(score["mean"]) * (100 if is_accuracy else 1) for score in found]
    before, after = (*means, None, None)[:2]
    return _change(before, after, ".1f", " %") if is_accuracy else _change(before, after, ".3g")


def _change(before: float | None, after: float | None, form: str, unit: str = "") -> str:
    shown = [format(x, form) for x in (before, after) if x is not None]
    return f"{' -> '.join(shown)}{unit}" if shown else "-"
