"""The torture test's project, its runs, and their processes by kind."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import uuid
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from skylite.engine.vllm.plugin import CPU_SERVER
from skylite.rollout.trusted_programs import remember
from skylite.run.run_dir import RunDir
from tests.alive import is_alive
from tests.e2e.project import COMMAND, FAKE_ENGINE, Project, make_project
from tests.torture.moments import CHECKPOINT_EVERY

STEPS = 24
"""Steps of a run."""
SETTINGS = (
    "trainer.deterministic=true",
    "trainer.num_threads=1",
    "engine.max_restarts=1000",
    "engine.stall_timeout_s=10",
    "trainer.step_timeout_s=60",
    "reward.timeout_s=20",
)
"""Bit-exact adapters, an engine that restarts as often as it is killed, short time-outs."""
VLLM_SETTINGS = ("engine.max_num_seqs=1", "engine.stall_timeout_s=60")
"""Numbers that do not depend on how vLLM batches."""
MARK = "SKYLITE_TORTURE"
"""Environment variable that every process of a run inherits. It finds orphans too."""
ROOT = Path(__file__).parents[2]
REWARD = '''
import os

def letters(prompt, completion):
    """Appends a byte per call, which shows when scoring starts."""
    with open(os.environ["SKYLITE_TORTURE_SCORED"], "ab") as stream:
        stream.write(b".")
    return sum(c.isascii() and c.isalpha() for c in completion) / max(1, len(completion))
'''


@dataclass(frozen=True, slots=True)
class Ground:
    """A project, and the engine and settings of its runs."""

    project: Project
    engine: str
    """"fake" (tests/fakes/engine.py) or "vllm"."""
    num_ranks: int
    settings: tuple[str, ...] = field(default=())

    def run(self, name: str) -> RunDir:
        return RunDir(self.project.root / name)

    def scored(self, name: str) -> Path:
        """File with one byte per scored completion."""
        return self.project.root / f"{name}.scored"

    def start(self, name: str, *, resume: bool = False, steps: int = STEPS) -> Started:
        """`skylite train`, or its resume, in a new session. The output goes to NAME.out."""
        mark = uuid.uuid4().hex
        env = {
            **os.environ,
            MARK: mark,
            "SKYLITE_TORTURE_SCORED": str(self.scored(name)),
            "ENGINE_DELAY_S": "0.05",
            "ENGINE_LOAD_DELAY_S": "0.05",
        }
        output = self.project.root / f"{name}.out"
        words = ["train", "--resume", name] if resume else self.project.train_args(name, steps, *self.flags())
        with output.open("ab") as stream:
            wall = time.time()
            start = output.stat().st_size
            process = subprocess.Popen(
                [*COMMAND, *words],
                cwd=self.project.root,
                stdin=subprocess.DEVNULL,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=env,
            )
        return Started(process, mark, output, start, wall)

    def flags(self) -> list[str]:
        values = (
            "eval.limit=0",
            f"checkpoint.every={CHECKPOINT_EVERY}",
            "sync.keep_last=400",
            f"trainer.num_ranks={self.num_ranks}",
            *(FAKE_ENGINE if self.engine == "fake" else []),
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
    """time.time() of the start."""
    seen: set[psutil.Process] = field(default_factory=set)
    """Processes found so far. A program that sets its title (vLLM's engine core) may overwrite the mark."""

    def text(self) -> str:
        """Output of this start."""
        return self.output.read_bytes()[self.output_start :].decode("utf-8", errors="replace")

    def alive(self) -> list[psutil.Process]:
        """The run's processes, orphans included."""
        for process in psutil.process_iter():
            if process not in self.seen and _is_marked(process, self.mark):
                self.seen.add(process)
                with contextlib.suppress(psutil.Error):
                    self.seen.update(process.children(recursive=True))
        return [p for p in self.seen if is_alive(p)]

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
    remember(f"{root / 'reward.py'}:letters")  # the user names the new content
    return Ground(project, engine, num_ranks, settings)


def victims(started: Started) -> dict[str, psutil.Process]:
    """The run's processes by kind (KINDS, rank-1 ..., engine-core)."""
    found: dict[str, psutil.Process] = {}
    for process in started.alive():
        with contextlib.suppress(psutil.Error):
            if kind := _kind(process, started.process.pid):
                found.setdefault(kind, process)
    return found


def _kind(process: psutil.Process, parent: int) -> str | None:
    words = process.cmdline()
    text, under_reaper = " ".join(words), any(w.endswith("reaper.py") for w in words[:6])
    trainer = "torch.distributed.run" in text
    if process.pid == parent:
        return "parent"
    if under_reaper:
        return "reaper-trainer" if trainer else "reaper-engine"
    if trainer:
        return "agent"
    if "skylite.trainer.worker" in text:
        return f"rank-{process.environ().get('LOCAL_RANK', '?')}"
    if "tests/fakes/engine.py" in text or CPU_SERVER in text:
        return "engine"
    if "multiprocessing.spawn" in text and process.ppid() == parent:
        return "reward-worker"
    return "engine-core" if text.startswith("VLLM::EngineCore") else None


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.environ().get(MARK) == mark
    except (psutil.Error, OSError):
        return False
