"""Resume: where it continues, which settings may change, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skylite.config.loading import change_config
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.rollout.plan import plan_run, write_run
from skylite.rollout.resume import check_changes, plan_resume
from skylite.run.checkpoint_folder import write_checkpoint_manifest
from skylite.run.run_dir import RunDir
from skylite.run.status import Status, write_status
from tests.logs import logged_messages
from tests.settings import typed
from tests.small_run import settings
from tests.unit.run_cases import make_model, write_data


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of 20 steps, started as by `skylite train`, with checkpoints of steps 10 and 20."""
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


def plan(run: RunDir, *settings: str, at: int | None = None) -> tuple[Any, list[str]]:
    with logged_messages() as logged:
        return plan_resume(run, typed({}, settings), at=at), logged


def test_a_run_resumes_from_its_newest_or_the_requested_checkpoint(run: RunDir) -> None:
    assert plan(run, "num_steps=30")[0].first_step == 21
    assert plan(run)[0].first_step == 21, "the last step is done, and what comes after it is not"
    earlier, _ = plan(run, at=10)
    assert (earlier.first_step, earlier.reuse_rollouts) == (11, False)
    assert plan(run, at=0)[0].first_step == 1


def test_a_damaged_checkpoint_is_skipped_with_a_warning(run: RunDir) -> None:
    (run.checkpoint_path(20) / "policy.safetensors").write_bytes(b"w")
    found, logged = plan(run)
    assert found.first_step == 11
    assert "step-000020 is damaged" in logged[0]


def test_the_memory_is_planned_again_and_printed(run: RunDir) -> None:
    _, logged = plan(run)
    assert any(line.startswith("memory: about") for line in logged), logged


def test_a_finished_run_cannot_resume_without_more_steps(run: RunDir) -> None:
    write_status(run.status_path, Status(phase="done", step=20, num_steps=20, adapter_version=20))
    with pytest.raises(ConfigError, match="at step 20 of 20 already"):
        plan(run)
    with pytest.raises(ConfigError, match="at step 20 of 15 already"):
        plan(run, "num_steps=15")
    assert plan(run, "num_steps=21")[0].first_step == 21


def test_a_damaged_status_does_not_stop_a_resume(run: RunDir) -> None:
    for torn in ("", '{"phase": "do'):
        run.status_path.write_text(torn)
        found, logged = plan(run)
        assert found.first_step == 21
        assert "status.json is not a valid run status" in logged[0]
        assert "The final evaluation is repeated." in logged[0]


def test_other_data_or_another_model_is_refused_and_moved_data_accepted(run: RunDir, tmp_path: Path) -> None:
    (tmp_path / "data").rename(tmp_path / "moved")
    assert plan(run, f"data.path={tmp_path / 'moved'}")[0].first_step == 21
    write_data(tmp_path / "data", 3)
    with pytest.raises(ConfigError, match=r"train\.parquet is not the file that the run was trained on"):
        plan(run)
    (tmp_path / "data" / "train.parquet").unlink()
    (tmp_path / "moved" / "train.parquet").rename(tmp_path / "data" / "train.parquet")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"architectures": ["OtherForCausalLM"]}))
    with pytest.raises(ConfigError, match="its fingerprint differs"):
        plan(run)


@pytest.mark.parametrize("name", ["tokenizer.json", "chat_template.jinja", "generation_config.json"])
def test_another_tokenizer_template_or_stop_token_is_refused(run: RunDir, tmp_path: Path, name: str) -> None:
    (tmp_path / "model" / name).write_text('{"changed": 1}')
    with pytest.raises(ConfigError, match=r"its fingerprint differs.*tokenizer.*chat template"):
        plan(run)


@pytest.mark.parametrize(
    "setting", ["rollout.temperature=0.7", "seed=1", "lora.rank=8", "algorithm.name=rloo", "optim.lr=1e-5"]
)
def test_a_setting_that_changes_the_result_is_refused_with_both_values(run: RunDir, setting: str) -> None:
    name = setting.partition("=")[0]
    with pytest.raises(
        ConfigError, match=rf"would change its result: {name} is \S+ and was given as \S+"
    ) as caught:
        plan(run, setting)
    if name == "optim.lr":
        assert "optim.lr is 0.0001 and was given as 1e-05" in str(caught.value)


def test_a_changed_reward_list_is_refused(run: RunDir) -> None:
    """The run started with the data's reward, math."""
    for setting in ('reward.functions=["gsm8k"]', 'reward.functions=["math", "format"]'):
        with pytest.raises(ConfigError, match=r"reward\.functions is \[\] and was given as \["):
            plan(run, setting)
    with pytest.raises(ConfigError, match=r"reward\.weights is \[\] and was given as \[0\.5\]"):
        plan(run, 'reward.functions=["math"]', "reward.weights=[0.5]")
    same = plan(run, 'reward.functions=["math"]')[0]
    assert (same.rewards, same.config.reward.functions) == (("math",), [])


def test_gpu_settings_are_also_refused_on_resume(run: RunDir) -> None:
    check_changes(settings(), settings(trainer={"offload": True}))
    with pytest.raises(ConfigError, match=r"trainer\.offload=true moves tensors off a GPU"):
        plan(run, "trainer.offload=true")


@pytest.mark.parametrize(
    "setting",
    [
        "num_steps=40",
        "eval.limit=0",
        "checkpoint.every=3",
        "sync.keep_every=5",
        "engine.start_timeout_s=9",
    ],
)
def test_settings_that_do_not_change_the_result_are_accepted(run: RunDir, setting: str) -> None:
    _, logged = plan(run, setting)
    assert not any("rounding" in text for text in logged)


def test_settings_that_change_only_rounding_are_accepted_and_logged(run: RunDir) -> None:
    found, logged = plan(run, "trainer.num_ranks=2")
    assert found.config.trainer.num_ranks == 2
    assert any(
        "trainer.num_ranks changes from 1 to 2: the result is the same up to rounding" in text
        for text in logged
    )


def test_more_steps_are_refused_if_the_learning_rate_ends_with_them() -> None:
    old = settings(optim={"schedule": "cosine"})
    with pytest.raises(
        ConfigError, match=r"num_steps is 3 and was given as 6 \(optim.schedule=cosine ends at num_steps\)"
    ):
        check_changes(old, change_config(old, typed({"num_steps": 6})))


def test_a_hub_model_that_left_the_cache_is_loaded_again_at_its_revision(
    run: RunDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree = json.loads(run.config_path.read_text())
    tree["config"]["model"]["name"] = "owner/name"
    tree["resolved"]["model"] |= {"revision": "0123abcd", "path": str(tmp_path / "gone")}
    run.config_path.write_text(json.dumps(tree))
    asked: list[str | None] = []

    def download(name: str, revision: str | None = None, **_: object) -> str:
        asked.append(revision)
        return str(tmp_path / "model")

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resumed, _ = plan(run)
    assert resumed.resolved.model.path == tmp_path / "model"
    assert asked == ["0123abcd"]
