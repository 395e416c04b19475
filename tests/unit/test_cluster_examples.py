"""The templates in examples/cluster: what each machine runs, by bash, with a recording `skylite`."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import skylite
from tests.settings import load_config
from tests.unit.doc_blocks import ROOT
from tests.unit.test_inline_commands import unknown

CLUSTER = ROOT / "examples" / "cluster"
KINDS = ("slurm", "skypilot", "kubernetes")
PROGRAMS = {
    "skylite": 'printf "%s\\0" skylite "$@" >> "$RECORD"; echo >> "$RECORD"',
    "pip": ":",
    # Both tasks, one after the other.
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; "$@"',
}


def kubernetes_job() -> dict[str, Any]:
    return list(yaml.safe_load_all((CLUSTER / "kubernetes.yaml").read_text()))[1]


def script(kind: str, machine: int) -> tuple[str, dict[str, str]]:
    """What bash runs on a machine, and its variables."""
    if kind == "slurm":
        return (CLUSTER / "slurm.sh").read_text(), {"SLURM_PROCID": str(machine), "SLURM_NNODES": "2"}
    if kind == "skypilot":
        task = yaml.safe_load((CLUSTER / "skypilot.yaml").read_text())
        own = {
            "SKYPILOT_NODE_RANK": str(machine),
            "SKYPILOT_NUM_NODES": str(task["num_nodes"]),
            "SKYPILOT_NUM_GPUS_PER_NODE": task["resources"]["accelerators"].partition(":")[2],
        }
        return task["run"], task["envs"] | own
    container = kubernetes_job()["spec"]["template"]["spec"]["containers"][0]
    own = {"JOB_COMPLETION_INDEX": str(machine)}
    return container["args"][0], {x["name"]: x["value"] for x in container["env"]} | own


def commands(kind: str, machine: int, folder: Path, has_run: bool) -> list[list[str]]:
    """The `skylite` commands of a machine. `has_run`: the run's folder has a run already."""
    shared, tools, record = folder / "shared", folder / "bin", folder / "record"
    for path in (shared / "run", shared / "skylite/.venv/bin", folder / ".venv/bin", tools):
        path.mkdir(parents=True)
    for activate in (shared / "skylite/.venv/bin/activate", folder / ".venv/bin/activate"):
        activate.touch()
    if has_run:
        (shared / "run/config.json").touch()
    for name, text in PROGRAMS.items():
        (tools / name).write_text(f"#!/bin/bash\n{text}\n")
        (tools / name).chmod(stat.S_IRWXU)
    text, variables = script(kind, machine)
    text = text.replace("/shared", str(shared))
    variables = {k: v.replace("/shared", str(shared)) for k, v in variables.items()}
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "RECORD": str(record), **variables}
    done = subprocess.run(
        ["bash", "-euc", text], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return [line.split("\0")[:-1] for line in record.read_text().replace(str(shared), "/shared").splitlines()]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_machine_starts_or_continues_and_the_others_join(kind: str, tmp_path: Path) -> None:
    found = {
        (machine, has_run): commands(kind, machine, tmp_path / f"{machine}-{has_run}", has_run)
        for machine in (0, 1)
        for has_run in (False, True)
    }
    join = [["skylite", "worker", "--join", "/shared/run"]]
    assert found[1, False] == found[1, True] == join
    assert found[0, True] == [["skylite", "train", "--resume", "/shared/run"]]
    [train] = found[0, False]
    assert train[:8] == ["skylite", "train", "--rank", "32", "--alpha", "32", "--run", "/shared/run"]
    for words in (train, *join, *found[0, True]):
        assert unknown(shlex.join(words)) == []
    pairs = [words.partition("=") for before, words in itertools.pairwise(train) if before == "--set"]
    trainer = load_config(None, {name: json.loads(v) if v.isdigit() else v for name, _, v in pairs}).trainer
    assert (trainer.hosts, trainer.num_ranks) == (2, 8)
    assert trainer.interface in ("eth0", "eth1")


def test_numbers_that_must_agree_do() -> None:
    spec = kubernetes_job()["spec"]
    container = spec["template"]["spec"]["containers"][0]
    hosts = next(int(x["value"]) for x in container["env"] if x["name"] == "HOSTS")
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", hosts, hosts)
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert f"/shared/skylite_rl-{skylite.__version__}-py3-none-any.whl[gpu]" in container["args"][0]
    head = [line for line in (CLUSTER / "slurm.sh").read_text().splitlines() if line.startswith("#SBATCH")]
    assert {"#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=1", "#SBATCH --gpus-per-node=8"} <= set(head)
