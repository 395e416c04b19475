"""How long after each kind of death it is noticed, said, cleaned up, and made good.

    python benchmarks/deaths.py --out benchmarks/results/deaths.json [--part ends|survives]

A tiny random model, two ranks. `survives`: one run on real vLLM that goes on by itself after each death in turn. `ends`: one run that ends
by each death in turn and is resumed at once, on the tests' synthetic for vLLM, whose start would hide all else; what a real one adds to
a resume shows where `survives` goes back to its checkpoint, engines included. Seconds from the signal:

- `said_s`: until the run says so in words. A time-out that tells a hang (stall, step) is part of it.
- `gone_s`: until no process of what died (where the run ends: of the run) is left.
- `goes_on_s`: until the first step after the last one recorded is recorded, so steps that are trained again count.
- `resume_s`: the part of that from the command `skylite train --resume` on.
- `steps_again`: steps after the checkpoint, trained a second time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import psutil
from surroundings import about

from skylite.run.files import write_json
from skylite.vllm_plugin import CPU_SERVER
from tests.e2e.project import Project, descendants, make_project
from tests.tiny_models import make_tiny_model

STALL_S, STEP_TIMEOUT_S, DEADLINE_S, CHECKPOINT_EVERY = 5, 40, 150, 5
STEPS = 3000
"""More than any run comes to."""
WORDS = ("skylite: ", "It is started again", "The run goes back", "is finished first", "stopping ")
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


@dataclass(slots=True)
class Watched:
    """A run whose lines are read as they come, with their time."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    def __post_init__(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """In a thread of its own."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def said(self, after: float) -> tuple[float, str] | None:
        """When it first spoke of a death or a stop."""
        return next(
            ((at, line) for at, line in self.lines if at >= after and any(words in line for words in WORDS)),
            None,
        )

    def processes(self) -> list[psutil.Process]:
        """The parent and everything below it."""
        return [psutil.Process(self.process.pid), *descendants(self.process.pid)]


def main() -> None:
    """Measure all and write the file; the part that is not measured stays as it is there."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--part", choices=["ends", "survives"], help="default: both")
    arguments = parser.parse_args()
    signal.signal(
        signal.SIGTERM, lambda *_: sys.exit(1)
    )  # `timeout` must leave no run behind, and the rows so far
    result: dict[str, Any] = json.loads(arguments.out.read_text()) if arguments.out.exists() else {}
    settings = {
        "engine.stall_timeout_s": STALL_S,
        "trainer.step_timeout_s": STEP_TIMEOUT_S,
        "checkpoint.every": CHECKPOINT_EVERY,
    }
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_STATE_HOME"] = folder  # the reward that is named here is no choice of the user's
        project = make_project(Path(folder), make_tiny_model(Path(folder) / "model"))
        for part, measure in (("survives", survived), ("ends", ended)):
            if arguments.part in (None, part):
                rows: list[dict[str, Any]] = []
                try:
                    measure(project, rows)
                finally:
                    result[part] = about() | {"settings": settings, "deaths": rows}
                    write_json(arguments.out, result)
                    show(rows)


def show(rows: list[dict[str, Any]]) -> None:
    """As a table of Markdown."""
    print(
        "| victim | signal | said | gone | goes on | steps again | in words |\n|---|---|---|---|---|---|---|"
    )
    for row in rows:
        times = " | ".join(
            "-" if row.get(key) is None else f"{row[key]:.2f} s" for key in ("said_s", "gone_s", "goes_on_s")
        )
        print(f"| {row['victim']} | {row['signal']} | {times} | {row['steps_again']} | {row['said']} |")


def survived(project: Project, rows: list[dict[str, Any]]) -> None:
    """One run that goes on by itself."""
    limits = [f"engine.max_restarts={len(SURVIVES)}", f"trainer.max_restarts={len(SURVIVES)}"]
    with running(project, "survives", fresh(project, "survives", *limits)) as watched:
        for victim, order in SURVIVES:
            tree, before = watched.processes(), trained(project, "survives")
            targets = victims(tree, victim)
            is_engine = victim.startswith("vLLM")
            died = [targets[0], *targets[0].children(recursive=True)] if is_engine else restarted(tree)
            began = strike(targets, order)
            wait(lambda at=began: watched.said(at) is not None, "the restart is said")  # type: ignore[misc]
            wait(lambda processes=died: not any(map(alive, processes)), "what died is gone")  # type: ignore[misc]
            gone, base = time.monotonic(), max(before, trained(project, "survives"))
            again = 0 if is_engine else base - newest_checkpoint(project, "survives")
            wait(lambda step=base: recorded(project, "survives") > step, "a step after the restart")  # type: ignore[misc]
            rows.append(
                row(victim, order, began, watched.said(began), gone, again)
                | {"goes_on_s": time.monotonic() - began}
            )
            wait(lambda step=base: recorded(project, "survives") > step + CHECKPOINT_EVERY // 2, "some steps")  # type: ignore[misc]


def ended(project: Project, rows: list[dict[str, Any]]) -> None:
    """One run that ends by every death, and is resumed."""
    os.environ["SKYLITE_ENGINE_COMMAND"] = f"{sys.executable} -m tests.fakes.engine"
    os.environ["PYTHONPATH"] = os.pathsep.join(
        filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")])
    )
    began, resumed, arguments = 0.0, 0.0, fresh(project, "ends")
    for victim, order in [*ENDS, ("", "")]:
        with running(project, "ends", arguments) as watched:
            if rows:
                rows[-1] |= {"goes_on_s": time.monotonic() - began, "resume_s": time.monotonic() - resumed}
            if not victim:
                break
            base = recorded(project, "ends")
            wait(lambda step=base: recorded(project, "ends") > step + CHECKPOINT_EVERY // 2, "some steps")  # type: ignore[misc]
            tree = watched.processes()
            began = strike(victims(tree, victim), order)
            wait(lambda processes=tree: not any(map(alive, processes)), "all processes of the run are gone")  # type: ignore[misc]
            gone = time.monotonic()
            time.sleep(0.2)  # for its last words, which a thread reads
            rows.append(
                row(
                    victim,
                    order,
                    began,
                    watched.said(began),
                    gone,
                    trained(project, "ends") - newest_checkpoint(project, "ends"),
                )
            )
        resumed, arguments = time.monotonic(), ["train", "--resume", "ends"]


def fresh(project: Project, run: str, *settings: str) -> list[str]:
    """The command of a new run."""
    limits = (
        f"engine.stall_timeout_s={STALL_S}",
        f"trainer.step_timeout_s={STEP_TIMEOUT_S}",
        f"checkpoint.every={CHECKPOINT_EVERY}",
    )
    words = [
        word
        for setting in ("eval.limit=0", "trainer.num_ranks=2", *limits, *settings)
        for word in ("--set", setting)
    ]
    return project.train_args(run, STEPS, *words)


@contextlib.contextmanager
def running(project: Project, run: str, arguments: list[str]) -> Iterator[Watched]:
    """A run that has come further than before, until the block ends; nothing of it is left after that."""
    base, watched = trained(project, run), Watched(project.start(*arguments))
    try:
        wait(lambda: recorded(project, run) > base or watched.process.poll() is not None, "a step")
        if watched.process.poll() is not None:
            raise RuntimeError("\n".join(line for _, line in watched.lines))
        yield watched
    finally:
        left = descendants(watched.process.pid) if watched.process.poll() is None else []
        watched.process.kill()
        watched.process.wait()
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


def strike(targets: list[psutil.Process], order: str) -> float:
    """Send the signal to all of them in one instant; returns when."""
    for target in targets if len(targets) > 1 else []:
        target.suspend()  # so that none can react to another's death
    began = time.monotonic()
    for target in targets:
        target.send_signal(getattr(signal, order))
    return began


def trained(project: Project, run: str) -> int:
    """The last step that the trainer has finished."""
    return max(
        (
            int(path.stem.removeprefix("step-"))
            for path in (project.root / run / "updates").glob("step-*.json")
        ),
        default=0,
    )


def recorded(project: Project, run: str) -> int:
    """The last step in metrics.jsonl."""
    return max((line["step"] for line in project.metrics(run)), default=0)


def newest_checkpoint(project: Project, run: str) -> int:
    """Its step."""
    return max(
        (
            int(path.name.removeprefix("step-"))
            for path in (project.root / run / "checkpoints").glob("step-??????")
        ),
        default=0,
    )


def restarted(tree: list[psutil.Process]) -> list[psutil.Process]:
    """What a run that goes back to its checkpoint starts again: all but the parent and its resource tracker."""
    return [p for p in tree[1:] if "resource_tracker" not in " ".join(p.cmdline())]


def row(
    victim: str, order: str, began: float, said: tuple[float, str] | None, gone: float, steps_again: int
) -> dict[str, Any]:
    """One line of the result."""
    return {
        "victim": victim,
        "signal": order,
        "said_s": None if said is None else said[0] - began,
        "gone_s": gone - began,
        "steps_again": steps_again,
        "said": "" if said is None else said[1],
    }


def victims(tree: list[psutil.Process], name: str) -> list[psutil.Process]:
    """The processes of a run that are called so."""
    commands = {p: p.cmdline() for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
    reapers = [p for p, c in commands.items() if any(word.endswith("reaper.py") for word in c[:5])]
    inner = {p: c for p, c in commands.items() if p not in reapers}
    agent = [p for p, c in inner.items() if "torch.distributed.run" in c]
    server = [p for p, c in inner.items() if CPU_SERVER in c]
    rewards = [
        p for p in tree[0].children() if p not in reapers and "resource_tracker" not in " ".join(p.cmdline())
    ]
    return {
        "parent": lambda: tree[:1],
        "parent and reapers at once": lambda: [tree[0], *reapers],
        "trainer's reaper": lambda: [agent[0].parent()],
        "torchrun agent": lambda: agent,
        "rank": lambda: [p for p, c in inner.items() if "skylite.trainer.worker" in c and p not in agent][
            -1:
        ],
        "reward worker": lambda: rewards[:1],
        "vLLM server": lambda: server,
        "vLLM engine core": lambda: [
            max(server[0].children(recursive=True), key=lambda p: p.memory_info().rss)
        ],
    }[name]()


def alive(process: psutil.Process) -> bool:
    """A zombie that nobody has collected does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def wait(condition: Callable[[], bool], what: str) -> None:
    """Until it holds; raises TimeoutError."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"in {DEADLINE_S} s not: {what}")
        time.sleep(0.01)


if __name__ == "__main__":
    main()
