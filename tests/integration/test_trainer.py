"""The trainer under real torchrun (gloo): ranks, a stop request, a rank that fails or is killed."""

from __future__ import annotations

import json
import os
import subprocess
import time
import uuid
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from skylite.adapters.manifest import read_manifest
from skylite.config.loading import read_run_config
from skylite.processes.hosts import TrainerStart
from skylite.processes.torchrun import trainer_command, trainer_env
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir, adapter_name
from tests.alive import is_alive
from tests.decisions import changed
from tests.integration.torchrun import (
    TIMEOUT_S,
    ended,
    finish,
    largest_difference,
    trainer,
    wait_for,
    weights,
)
from tests.rows import random_samples
from tests.small_run import make_run, settings

pytestmark = pytest.mark.dist
STEPS = {step: random_samples(step) for step in (1, 2, 3)}
LEARNED = {"at_most": {"long": 0.02}, "at_least": {"right": 0.5}, "limit_lr": 30.0, "entropy_target": 9.0}
"""Limits whose weights grow, and a weight of the entropy that does."""


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> RunDir:
    """Three steps in one process: what the others are compared with."""
    config = settings(checkpoint={"every": 2}, algorithm=LEARNED)
    run = make_run(tmp_path_factory.mktemp("straight"), tiny_llama, config, STEPS)
    finish(run, 1)
    return run


def test_two_ranks_give_the_update_of_one(straight: RunDir, tmp_path: Path, tiny_llama: Path) -> None:
    run = make_run(tmp_path / "two", tiny_llama, settings(algorithm=LEARNED), STEPS)
    finish(run, 2)
    assert largest_difference(weights(run, 0), weights(straight, 0)) == 0.0
    moved = largest_difference(weights(straight, 3), weights(straight, 0))
    assert largest_difference(weights(run, 3), weights(straight, 3)) < 1e-3 * moved
    one, two = (r.read_json(r.trainer_step_path(3))["metrics"] for r in (straight, run))
    for key in (
        "loss/policy",
        "optim/grad_norm",
        "policy/entropy",
        "mismatch/logprob_diff_max",
        "tokens/completion",
        "limit_weight/at_most/long",
        "limit_weight/at_least/right",
        "policy/entropy_coef",
    ):
        assert one[key] != 0, key
        assert two[key] == pytest.approx(one[key], rel=1e-4, abs=1e-6), key


def test_every_version_is_complete_before_it_is_announced(straight: RunDir) -> None:
    parents = []
    for version in range(4):
        folder = straight.default_adapters / adapter_name(version)
        parents.append(read_manifest(folder).parent)
        assert folder.stat().st_mtime_ns <= straight.trainer_step_path(version).stat().st_mtime_ns
    assert parents == [None, 0, 1, 2]
    assert all(np.all(v == 0) for k, v in weights(straight, 0).items() if "lora_B" in k)
    assert any(np.any(v != 0) for k, v in weights(straight, 1).items() if "lora_B" in k)


def test_peft_loads_a_published_adapter_and_gives_the_manifests_logprobs(
    straight: RunDir, tiny_llama: Path
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    folder = straight.default_adapters / adapter_name(3)
    canary = read_manifest(folder).canary
    model = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32), str(folder)
    )
    for ids, expected in zip(canary.sequences, canary.policy_logprobs, strict=True):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], dim=-1)
        found = [float(logprobs[t - 1, ids[t]]) for t in range(1, len(ids))]
        assert found == pytest.approx(expected, abs=1e-4)
    assert canary.policy_logprobs != canary.base_logprobs


def test_a_gradient_that_is_not_finite_ends_both_ranks_with_the_reason(
    tmp_path: Path, tiny_llama: Path
) -> None:
    run = make_run(tmp_path / "diverged", tiny_llama, settings(optim={"lr": 1e30}), STEPS)
    assert ended(run, 2) == 1
    reason = json.loads(run.trainer_error_path.read_text())
    assert "not finite" in reason["what"]
    assert "optim.lr" in reason["hint"]
    assert not run.trainer_step_path(1).exists()
    assert sorted(p.name for p in (run.rejected_steps / "step-000001").iterdir()) == [
        "reason.json",
        "rollouts.parquet",
    ]


def test_both_ranks_skip_a_bad_step_and_train_the_next(
    straight: RunDir, tmp_path: Path, tiny_llama: Path
) -> None:
    poisoned = [replace(s, sampling_logprobs=[float("nan")] * len(s.sampling_logprobs)) for s in STEPS[2]]
    run = make_run(
        tmp_path / "skipped", tiny_llama, settings(anomaly={"action": "skip"}), {**STEPS, 2: poisoned}
    )
    finish(run, 2)
    assert largest_difference(weights(run, 2), weights(run, 1)) == 0.0
    assert largest_difference(weights(run, 3), weights(run, 2)) > 0.0
    skipped = run.read_json(run.trainer_step_path(2))
    assert skipped["skipped"].startswith("the engine's logprob of token 0 in turn 0 of trajectory 0")
    assert "skipped" not in run.read_json(run.trainer_step_path(3))
    assert (run.rejected_steps / "step-000002" / "rollouts.parquet").read_bytes() == run.rollout_path(
        2
    ).read_bytes()


def test_a_missing_model_is_reported_in_one_sentence(tmp_path: Path, tiny_llama: Path) -> None:
    run = make_run(tmp_path / "missing", tiny_llama, settings(), STEPS)
    config = read_run_config(run.config_path)
    missing = config.model_copy(
        update={"resolved": changed(config.resolved, model={"path": tmp_path / "nowhere"})}
    )
    write_json(run.config_path, missing.model_dump(mode="json"))
    assert ended(run, 1) == 1
    assert "nowhere" in json.loads(run.trainer_error_path.read_text())["what"]


def test_a_stop_request_writes_a_checkpoint_and_ranks_die_with_a_killed_torchrun(
    tmp_path: Path, tiny_llama: Path
) -> None:
    run = make_run(tmp_path / "stopped", tiny_llama, settings(), {1: STEPS[1]})
    with trainer(run, 2) as process:
        wait_for(run.trainer_step_path(1), process)
        run.stop_path.touch()
        output, _ = process.communicate(timeout=TIMEOUT_S)
        assert process.returncode == 0, output
    assert [p.name for p in run.checkpoints.iterdir()] == ["step-000001"]
    assert not run.trainer_step_path(2).exists()

    run.stop_path.unlink()
    run.trainer_step_path(1).unlink()  # a resumed trainer writes it when it is ready
    with trainer(run, 2, resume=True) as process:
        wait_for(run.trainer_step_path(1), process)
        ranks = psutil.Process(process.pid).children(recursive=True)
        assert len(ranks) >= 2
        process.kill()
        process.wait()
        _, alive = psutil.wait_procs(ranks, timeout=15)
    assert list(filter(is_alive, alive)) == []


UNEXPECTED = """
from skylite.trainer import worker

def work(run, resume, host):
    import torch
    from skylite.model.process_group import process_group
    with process_group("cpu", run.rendezvous) as dist:
        if dist.dp_rank == 1:
            print(1 / 0)
        dist.all_reduce_sum_(torch.ones(1))

worker.run_trainer = work
worker.main()
"""


def test_an_unexpected_error_ends_all_ranks_and_its_last_line_is_the_reason(
    tmp_path: Path,
) -> None:
    """Rank 0 waits for rank 1 in a collective; its complaint about the lost peer comes second and must not
    hide the reason.
    """
    run = RunDir(tmp_path)
    (tmp_path / "work.py").write_text(UNEXPECTED)
    run.rendezvous.mkdir()
    command = trainer_command(run.root, run.rendezvous, 2, TrainerStart(uuid.uuid4().hex, resume=False))
    started = time.monotonic()
    done = subprocess.run(
        [*command[: command.index("-m", 2)], str(tmp_path / "work.py"), str(tmp_path)],
        env={**os.environ, **trainer_env(1)},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert done.returncode == 1
    assert time.monotonic() - started < 60
    assert "print(1 / 0)" in done.stderr, "the rank's own traceback is in the log"
    reason = json.loads(run.trainer_error_path.read_text())
    assert (reason["what"], reason["rank"], reason["final"]) == (
        "ZeroDivisionError: division by zero",
        1,
        False,
    )


HUNGRY = """
import torch
from skylite.algorithms.losses import POLICY_LOSSES

def loss(x, config):
    if len(x.policy_logprobs) > {limit}:
        torch.empty(1 << 60)  # more than any machine has
    return POLICY_LOSSES["clip"](x, config)
"""


def hungry(folder: Path, limit: int) -> str:
    """A policy loss that runs out of memory in a micro-batch of more than `limit` completion tokens."""
    path = folder / "hungry.py"
    path.write_text(HUNGRY.format(limit=limit), encoding="utf-8")
    return f"{path}:loss"


def short_run(root: Path, model: Path, steps: int, tokens: int, **sections: Any) -> RunDir:
    config = settings(**sections, trainer={"tokens_per_micro_batch": tokens})
    rows = {step: STEPS[step] for step in range(1, steps + 1)}
    return make_run(root, model, config.model_copy(update={"num_steps": steps}), rows)


def test_a_step_that_runs_out_of_memory_is_computed_again_with_smaller_micro_batches(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """The adapters are those of a run that had the smaller micro-batches from the start."""
    loss = hungry(tmp_path, 27)
    run = short_run(tmp_path / "large", tiny_llama, 2, 160, algorithm={"policy_loss": loss})
    finish(run, 1)
    first, second = (run.read_json(run.trainer_step_path(step)) for step in (1, 2))
    assert [r["tokens_per_micro_batch"] for r in (first, second)] == [40, 40]
    assert ["tokens_per_micro_batch=80" in w for w in first["warnings"]] == [True, False]
    assert "DefaultCPUAllocator: can't allocate memory" in first["warnings"][0]
    assert second["warnings"] == []
    small = short_run(tmp_path / "small", tiny_llama, 2, 40)
    finish(small, 1)
    for version in (1, 2):
        assert largest_difference(weights(run, version), weights(small, version)) == 0.0


def test_two_ranks_end_and_resume_with_smaller_micro_batches(tmp_path: Path, tiny_llama: Path) -> None:
    loss = hungry(tmp_path, 23)
    run = short_run(tmp_path / "two", tiny_llama, 1, 50, algorithm={"policy_loss": loss})
    assert ended(run, 2) == 1
    reason = run.read_json(run.trainer_error_path)
    assert (reason["final"], reason["out_of_memory"]) == (False, True), reason
    assert reason["what"].endswith("computed again with trainer.tokens_per_micro_batch=25.")
    finish(run, 2, resume=True)
    assert run.read_json(run.trainer_step_path(1))["tokens_per_micro_batch"] == 25
