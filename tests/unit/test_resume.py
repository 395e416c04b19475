"""Going on with a run: what may change, what is put away, what is refused; the rest stays."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skylite.config.loading import change_config
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, write_prompts
from skylite.errors import ConfigError
from skylite.orchestrator.plan import plan_run, write_run
from skylite.orchestrator.resume import check_changes, forget_after, plan_resume
from skylite.run.checkpoint_folder import checkpoint_steps, write_checkpoint_manifest
from skylite.run.metrics import read_metrics
from skylite.run.run_dir import RunDir
from skylite.run.status import Status, write_status
from tests.logs import logged_messages
from tests.reference import random_samples, settings, write_samples
from tests.unit.data_cases import prompt
from tests.unit.test_warm_start import make_model


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 20 steps with whole checkpoints of steps 10 and 20, as `skylite train` has begun it."""
    make_model(tmp_path / "model")
    write_data(tmp_path / "data", 4)
    config = TrainConfig.model_validate(
        {
            "num_steps": 20,
            "model": {"name": str(tmp_path / "model")},
            "data": {"path": str(tmp_path / "data")},
            "optim": {"lr": 1e-4},
        }
    )
    run = RunDir(tmp_path / "run")
    write_run(plan_run(config, run))
    for step in (10, 20):
        run.checkpoint_path(step).mkdir()
        (run.checkpoint_path(step) / "policy.safetensors").write_bytes(b"weights")
        write_checkpoint_manifest(run.checkpoint_path(step), step)
    return run


def write_data(folder: Path, count: int) -> None:
    info = PromptFileInfo(dataset="t", source_kind="generated", source="t", source_sha256="0", count=count, seed=0, split="train",
                          reward="math", system="", few_shot=[])  # fmt: skip
    write_prompts(folder / "train.parquet", [prompt(id=f"t/train/{i}") for i in range(count)], info)


def plan(run: RunDir, *settings: str, at: int | None = None) -> tuple[Any, list[str]]:
    with logged_messages() as said:
        return plan_resume(run, settings=settings, at=at), said


def test_a_run_goes_on_after_its_newest_checkpoint_or_the_one_asked_for(run: RunDir) -> None:
    assert plan(run, "num_steps=30")[0].first_step == 21
    assert plan(run)[0].first_step == 21, "the last step is done, and what comes after it is not"
    earlier, _ = plan(run, at=10)
    assert (earlier.first_step, earlier.reuse_rollouts) == (11, False)
    assert plan(run, at=0)[0].first_step == 1


def test_a_damaged_checkpoint_is_passed_over_aloud(run: RunDir) -> None:
    (run.checkpoint_path(20) / "policy.safetensors").write_bytes(b"w")
    found, said = plan(run)
    assert found.first_step == 11
    assert "step-000020 is damaged" in said[0]


def test_a_finished_run_has_nothing_to_go_on_with(run: RunDir) -> None:
    write_status(run.status_path, Status(phase="done", step=20, num_steps=20, adapter_version=20))
    with pytest.raises(ConfigError, match="at step 20 of 20 already"):
        plan(run)
    with pytest.raises(ConfigError, match="at step 20 of 15 already"):
        plan(run, "num_steps=15")
    assert plan(run, "num_steps=21")[0].first_step == 21


def test_a_damaged_status_says_nothing_and_refuses_nothing(run: RunDir) -> None:
    for torn in ("", '{"phase": "do'):
        run.status_path.write_text(torn)
        found, said = plan(run)
        assert found.first_step == 21
        assert "status.json is not a valid run status" in said[0]
        assert "What comes after the last step is done again." in said[0]


def test_other_data_or_another_model_is_refused_and_moved_data_is_found(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "data").rename(tmp_path / "moved")
    assert plan(run, f"data.path={tmp_path / 'moved'}")[0].first_step == 21
    write_data(tmp_path / "data", 3)
    with pytest.raises(ConfigError, match=r"train\.parquet is not the file that the run has been trained on"):
        plan(run)
    (tmp_path / "data" / "train.parquet").unlink()
    (tmp_path / "moved" / "train.parquet").rename(tmp_path / "data" / "train.parquet")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ConfigError, match="its fingerprint is another"):
        plan(run)


@pytest.mark.parametrize(
    "setting", ["rollout.temperature=0.7", "seed=1", "lora.rank=8", "algorithm.name=rloo", "optim.lr=1e-5"]
)
def test_a_change_of_the_result_is_refused_with_both_values(run: RunDir, setting: str) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"would change its result: {name} is \S+ and was given as \S+"
    ) as caught:
        plan(run, setting)
    if name == "optim.lr":
        assert "optim.lr is 0.0001 and was given as 1e-05" in str(caught.value)


def test_what_a_cpu_cannot_do_is_refused_on_resume_too(run: RunDir) -> None:
    check_changes(settings(), settings(trainer={"offload": True}))
    with pytest.raises(ConfigError, match=r"trainer\.offload=true moves things off a GPU"):
        plan(run, "trainer.offload=true")


@pytest.mark.parametrize(
    "setting",
    [
        "num_steps=40",
        "eval.limit=0",
        "checkpoint.every=3",
        "sync.keep_every=5",
        "engine.start_timeout_s=9",
        "model.use_shm=true",
    ],
)
def test_what_changes_nothing_is_taken(run: RunDir, setting: str) -> None:
    _, said = plan(run, setting)
    assert not any("rounding" in text for text in said)


def test_what_changes_rounding_is_taken_and_said(run: RunDir) -> None:
    found, said = plan(run, "trainer.num_ranks=2")
    assert found.config.trainer.num_ranks == 2
    assert any(
        "trainer.num_ranks is 2 from here on, before 1: the result is the same up to rounding" in text
        for text in said
    )


def test_more_steps_under_a_falling_rate_are_another_run() -> None:
    old = settings(optim={"schedule": "cosine"})
    with pytest.raises(
        ConfigError, match=r"num_steps is 3 and was given as 6 \(optim.schedule=cosine ends at num_steps\)"
    ):
        check_changes(old, change_config(old, {"num_steps": 6}, ()))


def leave_behind(run: RunDir) -> None:
    """Steps 1 to 5, a checkpoint of step 3 and one that should not be, and what a killed writer leaves."""
    for folder in (run.rollouts, run.trainer_steps, run.checkpoints, run.evals, run.default_adapters):
        folder.mkdir()
    for step in range(6):
        run.trainer_step_path(step).write_text("{}")
        (run.default_adapters / f"policy-v{step:06d}").mkdir()
        if step:
            write_samples(run.rollout_path(step), random_samples(step))
    for step in (3, 5):
        run.checkpoint_path(step).mkdir()
    (run.evals / "step-v000005.json").write_text("{}")
    (run.evals / "step-v000003.json").write_text("{}")
    (run.default_adapters / ".policy-v000006.tmp-77").mkdir()
    run.logs.mkdir()
    for file in (run.root / ".status.json.tmp-77", run.logs / ".trainer-error.json.tmp-77"):
        file.touch()
    (run.root / ".events.jsonl.tmp-77").symlink_to(run.rollouts)
    run.metrics_path.write_text(
        "".join(json.dumps({"step": s}) + "\n" for s in range(1, 6)) + '{"step": 6, "torn'
    )


def test_only_what_lies_beyond_the_checkpoint_is_forgotten(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    assert forget_after(run, run.default_adapters, 3, reuse_rollouts=False) == 2
    assert sorted(p.name for p in run.default_adapters.iterdir()) == [f"policy-v{v:06d}" for v in range(4)]
    assert sorted(run.rollouts.iterdir()) == [run.rollout_path(s) for s in (1, 2, 3)]
    assert sorted(run.trainer_steps.iterdir()) == [run.trainer_step_path(s) for s in range(3)]
    assert [p.name for p in run.evals.iterdir()] == ["step-v000003.json"]
    assert checkpoint_steps(run) == [3]
    assert not list(run.root.rglob(".*"))
    assert [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(("broken", "kept"), [(None, [1, 2, 3, 4, 5]), (5, [1, 2, 3, 4]), (4, [1, 2, 3])])
def test_stored_rollouts_are_kept_up_to_the_first_that_is_not_whole(
    tmp_path: Path, broken: int | None, kept: list[int]
) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    if broken is not None:
        run.rollout_path(broken).write_bytes(b"PAR1")
    with logged_messages() as said:
        forget_after(run, run.default_adapters, 3, reuse_rollouts=True)
    assert sorted(run.rollouts.iterdir()) == [run.rollout_path(s) for s in kept]
    assert any("stored rollouts" in text for text in said) == (len(kept) > 3)
    assert any("sampled again" in text for text in said) == (broken is not None)


def test_the_rollouts_of_a_step_that_went_bad_are_sampled_anew(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    (run.rejected_steps / "step-000004").mkdir(parents=True)
    forget_after(run, run.default_adapters, 3, reuse_rollouts=True)
    assert sorted(run.rollouts.iterdir()) == [run.rollout_path(s) for s in (1, 2, 3)]


def test_a_finished_step_that_the_dead_parent_had_not_recorded_is_recorded(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    run.trainer_step_path(2).unlink()
    run.trainer_step_path(3).write_text(
        json.dumps({"metrics": {"policy/entropy": 0.5}, "skipped": "loss/policy is nan"})
    )
    run.metrics_path.write_text(json.dumps({"step": 1}) + "\n")
    assert forget_after(run, run.default_adapters, 3, reuse_rollouts=False) == 0
    _, untold, last = read_metrics(run.metrics_path)
    assert (untold["step"], untold["policy/entropy"]) == (2, None)
    rewards = [s.reward for s in random_samples(3)]
    assert (last["step"], last["policy/entropy"], last["anomaly/reason"]) == (3, 0.5, "loss/policy is nan")
    assert last["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert last["canary/gap_max"] is None, "no engine has verified it"
    assert [m["step"] for m in read_metrics(run.metrics_path)] == [1, 2, 3]


def test_a_damaged_update_is_unknown_and_said(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    run.trainer_step_path(2).write_text("")
    run.trainer_step_path(3).write_text('{"metrics": {')
    run.metrics_path.write_text(json.dumps({"step": 1}) + "\n")
    with logged_messages() as said:
        forget_after(run, run.default_adapters, 3, reuse_rollouts=False)
    assert [(m["step"], m.get("policy/entropy")) for m in read_metrics(run.metrics_path)] == [
        (1, None),
        (2, None),
        (3, None),
    ]
    assert ["metrics of step 2 are unknown" in said[0], "metrics of step 3 are unknown" in said[1]] == [
        True,
        True,
    ]


CHANGES = ("rename", "replace", "unlink", "rmdir")
"""Of `os`: every call by which a name goes or another file takes it."""


def dies_at(number: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Whether `work` came to its change number `number` of names, where its process ends: no later one is made, by clean-ups neither."""
    calls = 0

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def change(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls >= number:
                raise KeyboardInterrupt
            real(*args, **kwargs)

        return change

    with monkeypatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except KeyboardInterrupt:
            return True
    return False


def test_a_kill_while_steps_are_forgotten_leaves_no_checkpoint_without_what_it_is_made_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At every change of a name; then a plain resume goes on from the newest checkpoint that is left."""
    for number in range(1, 100):
        run = RunDir(tmp_path / str(number))
        run.root.mkdir()
        leave_behind(run)
        for step in (3, 4, 5):
            (run.checkpoint_path(step)).mkdir(exist_ok=True)
            (run.checkpoint_path(step) / "manifest.json").touch()
            (run.default_adapters / f"policy-v{step:06d}" / "manifest.json").touch()
        run.metrics_path.write_text(json.dumps({"step": 1}) + "\n")
        run.trainer_step_path(3).write_text(json.dumps({"metrics": {"policy/entropy": 0.5}}))
        died = dies_at(
            number,
            monkeypatch,
            partial(forget_after, run, run.default_adapters, 3, reuse_rollouts=False),
        )
        newest = checkpoint_steps(run)[-1]
        assert all((run.checkpoint_path(s) / "manifest.json").exists() for s in checkpoint_steps(run))
        assert all(run.rollout_path(s).exists() for s in range(1, newest + 1))
        assert all(
            (run.default_adapters / f"policy-v{v:06d}" / "manifest.json").exists()
            for v in range(3, newest + 1)
        )
        forget_after(run, run.default_adapters, newest, reuse_rollouts=True)
        assert [m["step"] for m in read_metrics(run.metrics_path)] == list(range(1, newest + 1))
        assert read_metrics(run.metrics_path)[2]["policy/entropy"] == 0.5, (
            "the record of a finished step is not lost either"
        )
        assert not list(run.root.rglob(".*"))
        if not died:
            break
    assert number > 10
