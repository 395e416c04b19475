"""How fast does a run notice, report and recover from the death of each of its processes?

    python benchmarks/deaths.py --out benchmarks/results/deaths.json [--part ends|survives]

A tiny random model on two ranks. `survives`: one run on real vLLM that restarts what dies, for each death in
turn. `ends`: one run that ends with each death in turn and is resumed at once. It uses the tests' fake
engine, because the start of vLLM would hide everything else; `survives` shows that start. Seconds from the
signal:

- `reported_s`: until the run reports it in its output, including the time-out that detects a hang (stall,
  step).
- `gone_s`: until no process of the dead part is left; of the run, if the run ends.
- `next_step_s`: until the first new step is recorded. Steps that are trained again count.
- `resume_s`: the part of it that `skylite train --resume` takes.
- `repeated_steps`: steps after the checkpoint that are trained again.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import psutil
from command_line import argument_parser, set_flags
from machine_info import machine_info
from watched_run import (
    alive,
    newest_checkpoint,
    recorded,
    running,
    strike,
    trained,
    victims,
    wait,
    without_parent,
)

from skylite.engine.server_command import ENGINE_COMMAND
from skylite.run.files import write_json
from tests.e2e.project import Project, make_project
from tests.tiny_models import make_tiny_model

CHECKPOINT_EVERY = 5
SETTINGS = {
    "engine.stall_timeout_s": 5,
    "trainer.step_timeout_s": 40,
    "checkpoint.every": CHECKPOINT_EVERY,
}
STEPS = 3000
"""More than any of these runs reaches."""
SURVIVES = [
    ("vLLM server", "SIGKILL"),
    ("vLLM engine core", "SIGKILL"),
    ("vLLM server", "SIGSTOP"),
    ("vLLM engine core", "SIGSTOP"),
    ("rank", "SIGKILL"),
    ("rank", "SIGSTOP"),
]
ENDS = [
    ("rank", "SIGKILL"),
    ("rank", "SIGSTOP"),
    ("torchrun agent", "SIGKILL"),
    ("trainer's reaper", "SIGKILL"),
    ("reward worker", "SIGKILL"),
    ("parent", "SIGKILL"),
    ("parent and reapers at once", "SIGKILL"),
    ("parent", "SIGTERM"),
]


def main() -> None:
    """Measure and write the file. With --part, the other part of an existing file stays."""
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=["ends", "survives"], help="default: both")
    arguments = parser.parse_args()
    # So that `timeout` leaves no run behind, and keeps the rows so far.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    result: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = (
            folder  # skylite remembers named rewards there; keep the user's list clean
        )
        project = make_project(Path(folder), make_tiny_model(Path(folder) / "model"))
        for part, measure in (("survives", survived), ("ends", ended)):
            if arguments.part in (None, part):
                rows: list[dict[str, Any]] = []
                try:
                    measure(project, rows)
                finally:
                    result[part] = machine_info() | {"settings": SETTINGS, "deaths": rows}
                    write_json(arguments.out, result)
                    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """Print the rows as a Markdown table."""
    print("| victim | signal | reported | gone | next step | repeated steps | message |")
    print("|---|---|---|---|---|---|---|")
    for row in rows:
        times = (row.get(key) for key in ("reported_s", "gone_s", "next_step_s"))
        cells = " | ".join("-" if seconds is None else f"{seconds:.2f} s" for seconds in times)
        print(f"| {row['victim']} | {row['signal']} | {cells} | {row['repeated_steps']} | {row['message']} |")


def survived(project: Project, rows: list[dict[str, Any]]) -> None:
    """One run that restarts what dies. Appends a row per death."""
    restarts = {"engine.max_restarts": len(SURVIVES), "trainer.max_restarts": len(SURVIVES)}
    with running(project, "survives", new_run(project, "survives", restarts)) as watched:
        for victim, order in SURVIVES:
            tree, before = watched.processes(), trained(project, "survives")
            targets = victims(tree, victim)
            is_engine = victim.startswith("vLLM")
            died = [targets[0], *targets[0].children(recursive=True)] if is_engine else without_parent(tree)
            began = strike(targets, order)
            wait(partial(watched.has_reported, began), "a report of the restart")
            wait(partial(all_gone, died), "the end of the processes that died")
            gone, base = time.monotonic(), max(before, trained(project, "survives"))
            repeated = 0 if is_engine else base - newest_checkpoint(project, "survives")
            wait(partial(has_recorded, project, "survives", base + 1), "a step after the restart")
            found = row(victim, order, began, watched.report(began), gone, repeated)
            rows.append(found | {"next_step_s": time.monotonic() - began})
            wait(partial(has_recorded, project, "survives", base + 1 + CHECKPOINT_EVERY // 2), "some steps")


def ended(project: Project, rows: list[dict[str, Any]]) -> None:
    """One run that ends with each death and is resumed. Appends a row per death."""
    os.environ[ENGINE_COMMAND] = f"{sys.executable} -m tests.fakes.engine"
    paths = (str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH"))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    began, resumed, arguments = 0.0, 0.0, new_run(project, "ends", {})
    for victim, order in [*ENDS, ("", "")]:
        with running(project, "ends", arguments) as watched:
            if rows:
                rows[-1] |= {"next_step_s": time.monotonic() - began, "resume_s": time.monotonic() - resumed}
            if not victim:
                break
            base = recorded(project, "ends")
            wait(partial(has_recorded, project, "ends", base + 1 + CHECKPOINT_EVERY // 2), "some steps")
            tree = watched.processes()
            began = strike(victims(tree, victim), order)
            wait(partial(all_gone, tree), "the end of all processes of the run")
            gone = time.monotonic()
            time.sleep(0.2)  # a thread still reads the last lines
            repeated = trained(project, "ends") - newest_checkpoint(project, "ends")
            rows.append(row(victim, order, began, watched.report(began), gone, repeated))
        resumed, arguments = time.monotonic(), ["train", "--resume", "ends"]


def new_run(project: Project, run: str, settings: dict[str, int]) -> list[str]:
    """The arguments that start a new run."""
    flags = set_flags({"eval.limit": 0, "trainer.num_ranks": 2, **SETTINGS, **settings})
    return project.train_args(run, STEPS, *flags)


def has_recorded(project: Project, run: str, step: int) -> bool:
    return recorded(project, run) >= step


def all_gone(processes: list[psutil.Process]) -> bool:
    return not any(map(alive, processes))


def row(
    victim: str, order: str, began: float, report: tuple[float, str] | None, gone: float, repeated_steps: int
) -> dict[str, Any]:
    """One row of the result."""
    return {
        "victim": victim,
        "signal": order,
        "reported_s": None if report is None else report[0] - began,
        "gone_s": gone - began,
        "repeated_steps": repeated_steps,
        "message": "" if report is None else report[1],
    }


if __name__ == "__main__":
    main()
