"""Where torture takes place: a tiny project, the runs in it, their processes by kind, and whether what they left is whole."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from skylite.engine.server import ENGINE_COMMAND
from skylite.run.run_dir import RunDir
from skylite.vllm_plugin import CPU_SERVER
from tests.e2e.project import COMMAND, Project, make_project
from tests.torture.moments import CHECKPOINT_EVERY

STEPS = 24
"""Of a round: a run that is disturbed until its last step is done."""
SETTINGS = (
    "trainer.deterministic=true",
    "trainer.num_threads=1",
    "engine.max_restarts=1000",
    "engine.stall_timeout_s=10",
    "trainer.step_timeout_s=60",
    "reward.timeout_s=20",
)
"""Adapters bit for bit; an engine that is restarted as often as it is killed; processes that hang are told soon."""
VLLM_SETTINGS = ("engine.max_num_seqs=1", "engine.stall_timeout_s=60")
"""Numbers that do not depend on what vLLM batches together."""
MARK = "SKYLITE_TORTURE"
"""Environment variable of a run's processes, inherited by every descendant: finds them whoever their parent is."""
ROOT = Path(__file__).parents[2]
SYNTHETIC_COMMAND = f"{sys.executable} -m tests.fakes.engine"
REWARD = '''
import os

def letters(prompt, completion):
    """Each call leaves a byte, so that the moment of scoring can be seen."""
    with open(os.environ["SKYLITE_TORTURE_SCORED"], "ab") as stream:
        stream.write(b".")
    return sum(c.isascii() and c.isalpha() for c in completion) / max(1, len(completion))
'''


@dataclass(frozen=True, slots=True)
class Ground:
    """A project and what its runs are made with."""

    project: Project
    engine: str
    """"synthetic" or "vllm"."""
    num_ranks: int
    settings: tuple[str, ...] = field(default=())

    def run(self, name: str) -> RunDir:
        return RunDir(self.project.root / name)

    def scored(self, name: str) -> Path:
        """A byte for every completion that was scored."""
        return self.project.root / f"{name}.scored"

    def start(self, name: str, *, resume: bool = False, steps: int = STEPS) -> Started:
        """`skylite train`, or its resume, in a session of its own; the output goes to NAME.out."""
        mark = uuid.uuid4().hex
        env = {
            **os.environ,
            MARK: mark,
            "SKYLITE_TORTURE_SCORED": str(self.scored(name)),
            "ENGINE_DELAY_S": "0.05",
            "ENGINE_LOAD_DELAY_S": "0.05",
        }
        if self.engine == "synthetic":
            env[ENGINE_COMMAND] = SYNTHETIC_COMMAND
            env["PYTHONPATH"] = os.pathsep.join(
                filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])
            )  # the run is elsewhere
        output = self.project.root / f"{name}.out"
        words = ["train", "--resume", name] if resume else self.project.train_args(name, steps, *self.flags())
        with output.open("ab") as stream:
            wall = time.time()
            start = output.stat().st_size
            process = subprocess.Popen(
                [*COMMAND, *words], cwd=self.project.root, stdin=subprocess.DEVNULL, stdout=stream, stderr=subprocess.STDOUT,
                start_new_session=True, env=env,
            )  # fmt: skip
        return Started(process, mark, output, start, wall)

    def flags(self) -> list[str]:
        values = (
            "eval.limit=0",
            f"checkpoint.every={CHECKPOINT_EVERY}",
            "sync.keep_last=400",
            f"trainer.num_ranks={self.num_ranks}",
            *self.settings,
        )
        return [word for value in values for word in ("--set", value)]


@dataclass(frozen=True, slots=True)
class Started:
    """A run that was started."""

    process: subprocess.Popen[bytes]
    mark: str
    output: Path
    output_start: int
    wall: float
    """When, as time.time gives it."""
    seen: set[psutil.Process] = field(default_factory=set)
    """Its processes so far. A program that changes its title (vLLM's engine core) may write over the mark."""

    def said(self) -> str:
        return self.output.read_bytes()[self.output_start :].decode("utf-8", errors="replace")

    def alive(self) -> list[psutil.Process]:
        """Its processes, whoever adopted them."""
        for process in psutil.process_iter():
            if process not in self.seen and _is_marked(process, self.mark):
                self.seen.add(process)
                with contextlib.suppress(psutil.Error):
                    self.seen.update(process.children(recursive=True))
        return [p for p in self.seen if _lives(p)]

    def kill_all(self) -> None:
        for process in self.alive():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def make_ground(
    root: Path, model: Path, engine: str, num_ranks: int, settings: tuple[str, ...] = ()
) -> Ground:
    """A prepared project under `root`."""
    os.environ["SKYLITE_TORTURE_SCORED"] = str(root / "prepared.scored")
    project = make_project(root, model)
    (root / "reward.py").write_text(REWARD)
    return Ground(project, engine, num_ranks, settings)


def victims(started: Started) -> dict[str, psutil.Process]:
    """The run's processes by kind: parent, reaper-trainer, reaper-engine, agent, rank-0.., engine, engine-core, reward-worker."""
    found: dict[str, psutil.Process] = {}
    for process in started.alive():
        with contextlib.suppress(psutil.Error):
            if kind := _kind(process, started.process.pid):
                found.setdefault(kind, process)
    return found


def _kind(process: psutil.Process, parent: int) -> str | None:
    words = process.cmdline()
    text, guarded = " ".join(words), any(w.endswith("reaper.py") for w in words[:6])
    trainer = "torch.distributed.run" in text
    if process.pid == parent:
        return "parent"
    if guarded:
        return "reaper-trainer" if trainer else "reaper-engine"
    if trainer:
        return "agent"
    if "skylite.trainer.worker" in text:
        return f"rank-{process.environ().get('LOCAL_RANK', '?')}"
    if "tests.fakes.engine" in text or CPU_SERVER in text:
        return "engine"
    if "multiprocessing.spawn" in text and process.ppid() == parent:
        return "reward-worker"
    return "engine-core" if text.startswith("VLLM::EngineCore") else None


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
