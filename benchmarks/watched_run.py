"""A run that deaths.py disturbs: its output lines with their times, its processes by name, its progress on
disk."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import psutil

from skylite.vllm_plugin import CPU_SERVER
from tests.e2e.project import Project, descendants

DEADLINE_S = 150
REPORTS = ("skylite: ", "engine.max_restarts=", "trainer.max_restarts=", "stop.mode=")
"""Parts of the lines in which a run reports a death or a stop."""


@dataclass(slots=True)
class WatchedRun:
    """A run whose output is read as it appears."""

    process: subprocess.Popen[str]
    lines: list[tuple[float, str]] = field(default_factory=list)
    """(time.monotonic(), line)"""

    def __post_init__(self) -> None:
        threading.Thread(target=self.read, daemon=True).start()

    def read(self) -> None:
        """Collect lines until the output ends."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.rstrip()))

    def report(self, after: float) -> tuple[float, str] | None:
        """The first line after `after` that reports a death or a stop, with its time."""
        lines = (entry for entry in self.lines if entry[0] >= after)
        return next(((at, line) for at, line in lines if any(part in line for part in REPORTS)), None)

    def has_reported(self, after: float) -> bool:
        return self.report(after) is not None

    def processes(self) -> list[psutil.Process]:
        """The parent and its descendants."""
        return [psutil.Process(self.process.pid), *descendants(self.process.pid)]


@contextlib.contextmanager
def running(project: Project, run: str, arguments: list[str]) -> Iterator[WatchedRun]:
    """A run that has recorded a new step. At the end of the block all its processes are killed."""
    base, watched = trained(project, run), WatchedRun(project.start(*arguments))
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
    """Send the signal named `order` to all targets at the same time; returns when."""
    for target in targets if len(targets) > 1 else []:
        target.suspend()  # so that none can react to another's death
    began = time.monotonic()
    for target in targets:
        target.send_signal(getattr(signal, order))
    return began


def trained(project: Project, run: str) -> int:
    """The last step that the trainer finished."""
    return last_step(project, run, "trainer_steps", "step-??????.json")


def newest_checkpoint(project: Project, run: str) -> int:
    """The step of the newest checkpoint."""
    return last_step(project, run, "checkpoints", "step-??????")


def last_step(project: Project, run: str, folder: str, pattern: str) -> int:
    """The largest step number among the files of a run's folder, 0 if there is none."""
    paths = (project.root / run / folder).glob(pattern)
    return max((int(path.stem.removeprefix("step-")) for path in paths), default=0)


def recorded(project: Project, run: str) -> int:
    """The last step in metrics.jsonl."""
    return max((line["step"] for line in project.metrics(run)), default=0)


def without_parent(tree: list[psutil.Process]) -> list[psutil.Process]:
    """The processes that a return to the checkpoint restarts: all but the parent and its resource tracker."""
    return [p for p in tree[1:] if not is_resource_tracker(p)]


def victims(tree: list[psutil.Process], name: str) -> list[psutil.Process]:
    """The processes of a run that `name` stands for; `tree` starts with the parent."""
    commands = {p: p.cmdline() for p in tree if p.is_running() and p.status() != psutil.STATUS_ZOMBIE}
    reapers = [p for p, c in commands.items() if any(word.endswith("reaper.py") for word in c[:5])]
    inner = {p: c for p, c in commands.items() if p not in reapers}
    agent = [p for p, c in inner.items() if "torch.distributed.run" in c]
    ranks = [p for p, c in inner.items() if "skylite.trainer.worker" in c and p not in agent]
    server = [p for p, c in inner.items() if CPU_SERVER in c]
    found: dict[str, Callable[[], list[psutil.Process]]] = {
        "parent": lambda: tree[:1],
        "parent and reapers at once": lambda: [tree[0], *reapers],
        "trainer's reaper": lambda: [agent[0].parent()],
        "torchrun agent": lambda: agent,
        "rank": lambda: ranks[-1:],
        "reward worker": lambda: workers(tree[0], reapers)[:1],
        "vLLM server": lambda: server,
        "vLLM engine core": lambda: [largest(server[0].children(recursive=True))],
    }
    return found[name]()


def workers(parent: psutil.Process, reapers: list[psutil.Process]) -> list[psutil.Process]:
    """The reward workers: the parent's children that are neither reapers nor the resource tracker."""
    return [p for p in parent.children() if p not in reapers and not is_resource_tracker(p)]


def largest(processes: list[psutil.Process]) -> psutil.Process:
    """The process with the most memory."""
    return max(processes, key=lambda p: p.memory_info().rss)


def is_resource_tracker(process: psutil.Process) -> bool:
    return "resource_tracker" in " ".join(process.cmdline())


def alive(process: psutil.Process) -> bool:
    """Whether a process runs. A zombie does not."""
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def wait(condition: Callable[[], bool], what: str) -> None:
    """Wait until `condition` is true. Raises TimeoutError after DEADLINE_S."""
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"after {DEADLINE_S} s still missing: {what}")
        time.sleep(0.01)
