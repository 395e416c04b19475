"""Command lines: those of the scripts, and those of the processes that the scripts start."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skylite.processes.hardware import cpu_cores
from skylite.processes.torchrun import trainer_env

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the scripts use helpers of tests/

SKYLITE = [sys.executable, "-c", "from skylite.cli.main import main; main()"]
"""The `skylite` command of this Python."""


def argument_parser(docstring: str | None) -> argparse.ArgumentParser:
    """A parser whose --help prints the script's docstring as written."""
    return argparse.ArgumentParser(
        description=docstring, formatter_class=argparse.RawDescriptionHelpFormatter
    )


def set_flags(settings: Mapping[str, object]) -> list[str]:
    """`--set name=value` for each setting."""
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


def train_command(run: Path, data: Path, settings: Mapping[str, object]) -> list[str]:
    """`skylite train` with these settings, otherwise defaults. Its recipe is an empty file beside `run`."""
    recipe = run.with_suffix(".toml")
    recipe.write_text("", encoding="utf-8")
    where = ["--recipe", str(recipe), "--data", str(data), "--run", str(run)]
    return [*SKYLITE, "train", *where, *set_flags(settings)]


def under_torchrun(
    script: str, words: Sequence[str], num_ranks: int = 1, env: Mapping[str, str] | None = None
) -> Any:
    """Run `script` in the trainer's environment (or `env`); returns the JSON in its last line of output.

    A new process, because the allocator is chosen before Python starts and peak memory is counted from there.
    """
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={num_ranks}",
    ]
    added = trainer_env(max(1, cpu_cores() // num_ranks)) if env is None else env
    command = [*torchrun, script, *words]
    done = subprocess.run(command, env={**os.environ, **added}, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.splitlines()[-1])
