"""Write a report of one or several runs. One HTML page that needs no network; several are compared."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from skylite.cli.options import AsJson, newest_run
from skylite.errors import ConfigError
from skylite.progress_reporting import long_work
from skylite.report.html import GENERATOR, num_files, page_data, page_html
from skylite.report.read_run import read_facts
from skylite.report.sweep import table_text
from skylite.run.files import atomic_file
from skylite.run.sweep_dir import SweepDir
from skylite.ui.logs import show
from skylite.untrusted_files import open_file

MARK_BYTES = 2_000
"""The generator's mark is within these first bytes of a page."""


def report(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUN...", help="One run folder, several, or that of a sweep. Default: the newest."
        ),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page to write.", show_default="report-RUN.html")
    ] = None,
    completions: Annotated[
        int, typer.Option(min=0, help="Maximum completions in the page, over all runs.")
    ] = 4000,
    as_json: AsJson = False,
) -> None:
    """Write the page, and print its path and what it found."""
    targets = targets or [newest_run()]
    mark = marks_of(targets)
    if out is None:
        out = Path(default_name(targets))
        require_own_page(out, mark)
    else:
        require_own_page(out)
    sweeps = [SweepDir(target) for target in targets if SweepDir.is_one(target)]
    runs = [read_facts(run) for target in targets for run in runs_of(target)]
    with long_work("reading the runs", total=sum(map(num_files, runs))) as work:
        page = page_data(runs, completions, work.advance)
    text = page_html(page, mark)
    with atomic_file(out, len(text)) as temporary:
        temporary.write_text(text, encoding="utf-8")
    if as_json:
        show(json.dumps(result(out, page)))
        return
    for sweep in sweeps:
        show(table_text(sweep))
    for run in page["runs"]:
        for alarm in run["alarms"]:
            show(f"{run['label']}: {'alarm' if alarm['is_alarm'] else 'warning'}: {alarm['text']}")
        for line in run["unreadable"]:
            show(f"{run['label']}: not read: {line}")
    show(f"{out} ({len(text) / 1e6:.1f} MB): open it in a browser")


def runs_of(target: Path) -> list[Path]:
    """The runs of a sweep that have a step; any other folder is a run. Raises ConfigError if none has."""
    if not SweepDir.is_one(target):
        return [target]
    sweep = SweepDir(target)
    runs = [run.root for name in sweep.policies() if (run := sweep.run(name)).metrics_path.exists()]
    if not runs:
        raise ConfigError(f"No policy of the sweep {target} has finished a step yet.", "Wait for one.")
    return runs


def result(out: Path, page: dict[str, Any]) -> dict[str, Any]:
    """What `--json` prints."""
    keys = ("label", "phase", "steps", "num_steps", "reward_first", "reward_last", "held_out_first",
            "held_out_last", "alarms", "unreadable")  # fmt: skip
    return {
        "html": str(out),
        "runs": [{key: run[key] for key in keys} for run in page["runs"]],
    }


def default_name(targets: Sequence[Path]) -> str:
    """Such as report-NAME.html or report-NAME-and-2-more.html."""
    more = f"-and-{len(targets) - 1}-more" if len(targets) > 1 else ""
    return f"report-{targets[0].resolve().name}{more}.html"


def marks_of(targets: Sequence[Path]) -> str:
    """Tells the page of these runs from that of others with the same names, without their paths."""
    paths = "\n".join(str(target.resolve()) for target in targets)
    return hashlib.sha256(os.fsencode(paths)).hexdigest()[:16]


def require_own_page(out: Path, mark: str | None = None) -> None:
    """Raises ConfigError if `out` exists and is no page of ours, or with a `mark` one about other runs."""
    if not out.exists():
        return
    if not out.is_file():
        raise ConfigError(f"--out {out} is not a file.", "Choose another path.")
    with open_file(out) as stream:
        head = stream.read(MARK_BYTES)
    if f'content="{GENERATOR}"'.encode() not in head:
        raise ConfigError(
            f"{out} exists and is not a page of `skylite report`.", "Choose another path with --out."
        )
    if mark is not None and f'content="{mark}"'.encode() not in head:
        raise ConfigError(f"{out} exists and is a report of other runs.", "Choose another path with --out.")
