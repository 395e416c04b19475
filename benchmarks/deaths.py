"""How long after each kind of death it is noticed, said, cleaned up, and (engines) made good.

    python benchmarks/deaths.py --out benchmarks/results/deaths.json

A tiny random model. Engines: real vLLM, one run that goes on after each of four deaths. All else: runs that end by the death, with
the tests' stand-in for vLLM's server (tests/fakes), because what is measured is torchrun, guards and the parent. Seconds from the signal:
`said_s` until the run says so in words, `gone_s` until no process of what died (or, where the run ends, of the run) is left,
`goes_on_s` until the next step is recorded. stall and step time-outs are part of what they end.
"""

from __future__ import annotations

import argparse
import contextlib
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
from tests.e2e.project import Project, descendants, make_project
from tests.tiny_models import make_tiny_model

FAKES = Path(__file__).parents[1] / "tests" / "fakes"
STALL_S, STEP_TIMEOUT_S, DEADLINE_S = 5, 30, 120
ENGINE_DEATHS = [("vLLM server", "SIGKILL"), ("vLLM engine core", "SIGKILL"), ("vLLM server", "SIGSTOP"), ("vLLM engine core", "SIGSTOP")]
OTHER_DEATHS = [
    ("rank", "SIGKILL"),
    ("rank", "SIGSTOP"),
    ("torchrun agent", "SIGKILL"),
    ("trainer's guard", "SIGKILL"),
    ("parent", "SIGKILL"),
    ("parent and guards at once", "SIGKILL"),
    ("reward worker", "SIGKILL"),
]


@dataclass(slots=True)
class Watched:
    """A run whose lines are read as they come, with their time."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)

    def read(self) -> None:
        """In a thread of its own."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def first(self, words: str, after: float) -> tuple[float, str] | None:
        """When a line with these words came."""
        return next(((at, line) for at, line in self.lines if at >= after and words in line), None)


def main() -> None:
    """Measure all and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", help="deaths whose victim contains this")
    arguments = parser.parse_args()
    wanted: Callable[[tuple[str, str]], bool] = lambda death: arguments.only is None or arguments.only in death[0]  # noqa: E731
    with tempfile.TemporaryDirectory() as folder:
        project = make_project(Path(folder), make_tiny_model(Path(folder) / "model"))
        rows = [one_that_ends(project, index, *death) for index, death in enumerate(filter(wanted, OTHER_DEATHS))]
        rows += engines(project, list(filter(wanted, ENGINE_DEATHS)))
    settings = {"engine.stall_timeout_s": STALL_S, "trainer.step_timeout_s": STEP_TIMEOUT_S}
    write_json(arguments.out, about() | {"settings": settings, "deaths": rows})
    print("| victim | signal | said | gone | goes on | in words |\n|---|---|---|---|---|---|")
    for row in rows:
        print(
            f"| {row['victim']} | {row['signal']} | {shown(row['said_s'])} | {shown(row['gone_s'])} | {shown(row['goes_on_s'])} | {row['said']} |"
        )


def shown(seconds: float | None) -> str:
    """For the table."""
    return "-" if seconds is None else f"{seconds:.2f} s"


@contextlib.contextmanager
def running(project: Project, run: str, *settings: str) -> Iterator[Watched]:
    """A run until the block ends; nothing of it is left after that."""
    words = [word for setting in ("eval.limit=0", "trainer.num_ranks=2", *settings) for word in ("--set", setting)]
    watched = Watched(project.start(*project.train_args(run, 500, *words)))
    threading.Thread(target=watched.read, daemon=True).start()
    try:
        wait(lambda: len(project.metrics(run)) >= 2 or watched.process.poll() is not None, "two steps")
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


def one_that_ends(project: Project, index: int, victim: str, order: str) -> dict[str, Any]:
    """A run that ends by this death."""
    os.environ["FAKE_VLLM"], before = str(project.root), os.environ.get("PYTHONPATH", "")
    os.environ["PYTHONPATH"] = f"{FAKES}:{before}"
    try:
        with running(project, f"ends-{index}", f"trainer.step_timeout_s={STEP_TIMEOUT_S}") as watched:
            tree = [psutil.Process(watched.process.pid), *descendants(watched.process.pid)]
            targets = victims(tree, victim)
            for target in targets if len(targets) > 1 else []:
                target.suspend()  # so that none can react to another's death
            began = time.monotonic()
            for target in targets:
                target.send_signal(getattr(signal, order))
            wait(lambda: not any(map(alive, tree)), "all processes of the run are gone")
            gone = time.monotonic() - began
            time.sleep(0.2)
            said = watched.first("skylite: ", began)
    finally:
        os.environ["PYTHONPATH"] = before
    return row(victim, order, began, said, gone, None)


def engines(project: Project, deaths: list[tuple[str, str]]) -> list[dict[str, Any]]:
    """One run on real vLLM that survives every death in turn."""
    rows: list[dict[str, Any]] = []
    if not deaths:
        return rows
    settings = (f"engine.stall_timeout_s={STALL_S}", f"engine.max_restarts={len(deaths)}")
    with running(project, "engines", *settings) as watched:
        for victim, order in deaths:
            (target,) = victims([psutil.Process(watched.process.pid), *descendants(watched.process.pid)], victim)
            tree = [target, *target.children(recursive=True)]
            began, count = time.monotonic(), len(rows) + 1
            target.send_signal(getattr(signal, order))
            wait(lambda at=began: watched.first("It is started again", at) is not None, "the restart is said")  # type: ignore[misc]
            wait(lambda processes=tree: not any(map(alive, processes)), "the old server is gone")  # type: ignore[misc]
            gone = time.monotonic() - began
            wait(lambda n=count: (project.metrics("engines")[-1].get("restarts") or 0) >= n, "a step after the restart")  # type: ignore[misc]
            goes_on = time.monotonic() - began
            rows.append(row(victim, order, began, watched.first("It is started again", began), gone, goes_on))
    return rows


def row(victim: str, order: str, began: float, said: tuple[float, str] | None, gone_s: float, goes_on_s: float | None) -> dict[str, Any]:
    """One line of the result."""
    return {
        "victim": victim,
        "signal": order,
        "said_s": None if said is None else said[0] - began,
        "gone_s": gone_s,
        "goes_on_s": goes_on_s,
        "said": "" if said is None else said[1],
    }


def victims(tree: list[psutil.Process], name: str) -> list[psutil.Process]:
    """The processes of a run that are called so."""
    commands = {p: p.cmdline() for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
    guards = [p for p, c in commands.items() if any(word.endswith("guard.py") for word in c[:5])]
    inner = {p: c for p, c in commands.items() if p not in guards}
    agent = [p for p, c in inner.items() if "torch.distributed.run" in c]
    server = [p for p, c in inner.items() if "vllm.entrypoints.openai.api_server" in c]
    rewards = [p for p in tree[0].children() if p not in guards and "resource_tracker" not in " ".join(p.cmdline())]
    return {
        "parent": lambda: tree[:1],
        "parent and guards at once": lambda: [tree[0], *guards],
        "trainer's guard": lambda: [agent[0].parent()],
        "torchrun agent": lambda: agent,
        "rank": lambda: [p for p, c in inner.items() if "skylite.training.worker" in c and p not in agent][-1:],
        "reward worker": lambda: rewards[:1],
        "vLLM server": lambda: server,
        "vLLM engine core": lambda: [max(server[0].children(), key=lambda p: p.memory_info().rss)],
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
