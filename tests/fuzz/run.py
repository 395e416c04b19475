"""Read damaged files in processes of their own, and count how that ends.

`python -m tests.fuzz.run GROUND` imports the readers once (4 s) and forks for every batch of files.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import resource
import signal
import subprocess
import sys
import tempfile
import traceback
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

from skylite.errors import SkyliteError
from tests.forks import in_a_fork
from tests.fuzz.damage import KINDS
from tests.fuzz.readers import READERS
from tests.unit.bad_inputs import snapshot

CPU_S = 20.0
"""Limit of CPU time for one file, here and in the sandbox. Other work of the machine does not count."""
WALL_S = 240.0
"""Limit for one file that waits. Longer than the limits of the sandbox (data/chat_tokenizer.py)."""
MEMORY = 6 << 30
ROOT = Path(__file__).resolve().parents[2]


class Fuzzer:
    """A child process that has imported every reader. Each batch of files is read in a fork of it."""

    def __init__(self, ground: Path) -> None:
        self.ground, self.log = ground, ground.parent / "fuzz.log"

    def __enter__(self) -> Fuzzer:
        # Temporary files, the home and the working folder are on the ground, too.
        home = str(self.ground / "home")
        places = {"HOME": home, "XDG_STATE_HOME": home, "XDG_CACHE_HOME": home}
        places["TMPDIR"] = str(self.ground / "tmp")
        places["TORCHINDUCTOR_CACHE_DIR"] = str(self.ground.parent / "compiled")  # for the tiny model
        env = {**os.environ, **places, "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}", "PYTHONDONTWRITEBYTECODE": "1"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.fuzz.run", str(self.ground)],
                cwd=self.ground,
                env=env,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()

    def fuzz(self, reader: str, seed: int, count: int) -> dict[str, Any]:
        """Read `count` damaged files in a fork. Returns outcomes, and evidence of what went wrong."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        before, logged = _state(self.ground), self.log.stat().st_size
        print(json.dumps([reader, seed, count]), file=self.process.stdin, flush=True)
        try:
            result: dict[str, Any] = json.loads(self.process.stdout.readline())
        except ValueError:
            text = self.log.read_text(errors="replace")[logged:]
            result = {"counts": {"traceback": 1}, "evidence": [f"{reader} seed {seed}: {text[-2000:]}"]}
        touched = sorted({name for name, _ in _state(self.ground) ^ before})
        result["counts"]["touched"] = result["counts"].get("touched", 0) + len(touched)
        result["evidence"] += [f"{reader} seed {seed} touched {name}" for name in touched]
        return result


def make_ground(folder: Path) -> Path:
    """A folder with files around the working folder that must stay as they are."""
    for name in ("home", "tmp", "beside"):
        (folder / name).mkdir(parents=True)
        (folder / name / "precious.txt").write_text(name)
    return folder


def _state(ground: Path) -> set[tuple[str, tuple[int, int]]]:
    """Files with size and time, and the names of folders: temporary files come and go in them."""
    found = snapshot(ground).items()
    return {(name, (0, 0) if (ground / name).is_dir() else value) for name, value in found}


def main(ground: Path) -> None:
    """Answer a line of stdin, [reader, seed, count], with JSON, or an empty line if the fork died."""
    gc.freeze()  # a collection in a fork would copy every page it looks at
    for line in sys.stdin:
        reader, seed, count = json.loads(line)
        try:
            text = in_a_fork(partial(_read_damaged, reader, seed, count, ground), 60 + WALL_S * count)
        except TimeoutError as error:
            text = json.dumps({"counts": {"hang": 1}, "evidence": [f"{reader} seed {seed}: {error}"]})
        print(text, flush=True)


def _read_damaged(reader: str, seed: int, count: int, ground: Path) -> dict[str, Any]:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    outcomes: Counter[str] = Counter()
    evidence: list[str] = []
    with tempfile.TemporaryDirectory(dir=ground.parent) as work:
        folder = Path(work) / "work"
        folder.mkdir()
        READERS[reader].prepare(folder)
        for number in range(count):
            chosen = random.Random(f"{reader}/{seed}/{number}")
            kind = chosen.choice(KINDS)
            READERS[reader].damage(folder, chosen, kind)
            outcome, wrong = _judge(reader, folder)
            outcomes[outcome] += 1
            evidence += [f"{reader} {kind} {seed}/{number}: {text}" for text in wrong]
    return {"counts": outcomes, "evidence": evidence[:20]}


def _judge(reader: str, folder: Path) -> tuple[str, list[str]]:
    """How reading the file ends, and what is wrong with that."""
    before, started = snapshot(folder), _cpu_s()
    outcome, wrong = "accepted", []
    signal.signal(signal.SIGALRM, _raise_too_long)
    signal.setitimer(signal.ITIMER_REAL, WALL_S)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            READERS[reader].read(folder)
    except TooLong:
        outcome, wrong = "hang", [f"it did not end within {WALL_S:.0f} s"]
    except SkyliteError as error:
        outcome = "refused" if str(error).strip() else "traceback"
    except BaseException:  # noqa: BLE001 what a user would see as a traceback is the finding
        outcome, wrong = "traceback", [traceback.format_exc()[-1500:]]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    if (seconds := _cpu_s() - started) > CPU_S:
        outcome, wrong = "hang", [f"it took {seconds:.0f} s of CPU time"]
    if snapshot(folder) != before:
        outcome, wrong = "touched", ["it changed its folder"]
    return outcome, wrong


class TooLong(BaseException):
    """A file took longer than WALL_S."""


def _raise_too_long(*_: object) -> None:
    raise TooLong


def _cpu_s() -> float:
    """CPU time of this process and of its ended children."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(u.ru_utime + u.ru_stime for u in used)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
