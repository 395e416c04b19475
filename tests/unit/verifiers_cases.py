"""verifiers for the tests. It requires older versions of openai and mcp than the other tests run with.

`make setup` therefore installs it into the folder `verifiers`, which is on no import path. It is never
imported here: `skylite prepare` and the host of episodes are processes that find it by PYTHONPATH.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = Path(sys.prefix) / "verifiers"
ENVIRONMENTS = (ROOT / "tests" / "verifiers_envs", ROOT / "examples" / "verifiers_game")


def add_verifiers(patch: pytest.MonkeyPatch) -> None:
    """Let processes that start from here find verifiers, and the look-up of its version; or skip the test."""
    paths = [str(path) for path in (*ENVIRONMENTS, FOLDER)]
    patch.setattr(sys, "path", [*sys.path, str(FOLDER)])
    patch.setenv("PYTHONPATH", os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")]).rstrip(os.pathsep))
    try:
        metadata.version("verifiers")
    except metadata.PackageNotFoundError:
        pytest.skip("verifiers is not installed: run `make setup`")


def prepare(spec: str, folder: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    """`skylite prepare` in a process of its own."""
    program = [sys.executable, "-c", "from skylite.entry_point import main; main()"]
    words = [*program, "prepare", spec, "--out", str(folder), *flags]
    return subprocess.run(words, capture_output=True, text=True, check=False)


REFUSALS = """
import json, sys
from skylite.data.verifiers import verifiers_examples
from skylite.environments.verifiers_episode import verifiers_episode
from skylite.errors import SkyliteError

for spec in sys.argv[1:]:
    try:
        verifiers_episode(spec)
        verifiers_examples(spec, limit=None, seed=0)
        print(json.dumps(""))
    except SkyliteError as error:
        assert error.hint or "task(s)" in error.what
        print(json.dumps(error.what))
"""


def refusals(specs: Sequence[str]) -> list[str]:
    """For each environment why its episodes or its data are refused; "" if they are not."""
    words = [sys.executable, "-c", REFUSALS, *specs]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]
