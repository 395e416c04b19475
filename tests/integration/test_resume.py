"""A killed run resumes under real torchrun: bit for bit on as many ranks, up to rounding on others."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from skylite.cli.replay import replay
from skylite.errors import ConfigError, ModelError
from skylite.rollout.resume import remove_after
from skylite.run.checkpoint_folder import checkpoint_steps, choose_checkpoint, verify_checkpoint
from skylite.run.run_dir import RunDir, published_versions
from tests.integration.torchrun import ended, finish, largest_difference, trainer, wait_for, weights
from tests.rows import random_samples
from tests.small_run import make_run, settings

pytestmark = pytest.mark.dist
STEPS = {step: random_samples(step) for step in (1, 2, 3, 4)}
LEARNED = {"at_most": {"long": 0.02}, "limit_lr": 30.0, "entropy_target": 9.0}
"""A limit whose weight grows, and a weight of the entropy that does."""
CONFIG = settings(
    num_steps=4,
    optim={"schedule": "cosine", "warmup_steps": 1},
    algorithm={"updates_per_step": 2, **LEARNED},
    checkpoint={"every": 2},
    trainer={"deterministic": True},
)


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> RunDir:
    """Four steps that nothing disturbs."""
    run = make_run(tmp_path_factory.mktemp("straight"), tiny_llama, CONFIG, STEPS)
    finish(run, 1)
    return run


def resume_trainer(run: RunDir, num_ranks: int, at: int | None = None) -> int:
    """What the parent does before it starts the trainer again, then the trainer to its end; the step it began
    after.
    """
    done = choose_checkpoint(run, at)
    remove_after(run, run.default_adapters, done, reuse_rollouts=True)
    finish(run, num_ranks, resume=True)
    return done


def learned(run: RunDir) -> dict[str, float]:
    """What the last checkpoint holds besides the adapter."""
    found: dict[str, float] = run.read_json(run.checkpoint_path(4) / "state.json")["learned"]
    return found


def copy_of(straight: RunDir, root: Path) -> RunDir:
    """The run as if it had been made somewhere else."""
    shutil.copytree(straight.root, root)
    config = (root / "config.json").read_text().replace(str(straight.root), str(root))
    (root / "config.json").write_text(config)
    return RunDir(root)


def test_a_killed_run_resumes_bit_for_bit(straight: RunDir, tmp_path: Path, tiny_llama: Path) -> None:
    run = make_run(tmp_path / "killed", tiny_llama, CONFIG, {s: STEPS[s] for s in (1, 2, 3)})
    with trainer(run, 1) as process:
        wait_for(run.trainer_step_path(3), process)
        os.killpg(process.pid, signal.SIGKILL)
    assert checkpoint_steps(run) == [2]
    shutil.copy(straight.rollout_path(4), run.rollout_path(4))
    assert resume_trainer(run, 1) == 2
    assert run.read_json(run.trainer_step_path(2))["resumed"] is True
    for version in range(5):
        assert largest_difference(weights(run, version), weights(straight, version)) == 0.0, version
    verify_checkpoint(run.checkpoint_path(4))
    assert learned(run) == learned(straight)
    assert learned(run).keys() == {"limit_weight/at_most/long", "policy/entropy", "policy/entropy_coef"}
    assert min(learned(run).values()) > 0
    tensors = [path.name for path in sorted(straight.checkpoint_path(4).glob("*.safetensors"))]
    assert len(tensors) == len(("weights", "exp_avg", "exp_avg_sq"))
    for name in tensors:
        assert (
            largest_difference(
                load_file(run.checkpoint_path(4) / name), load_file(straight.checkpoint_path(4) / name)
            )
            == 0.0
        ), name


def test_a_run_of_one_rank_resumes_on_two_and_a_run_of_two_on_one(straight: RunDir, tmp_path: Path) -> None:
    run = copy_of(straight, tmp_path / "copy")
    assert resume_trainer(run, 2, at=2) == 2
    state = run.read_json(run.checkpoint_path(4) / "state.json")
    moved = largest_difference(weights(straight, 4), weights(straight, 2))
    assert largest_difference(weights(run, 4), weights(straight, 4)) < 1e-3 * moved
    assert state["optimizer_updates"] == {"policy": 8}
    assert learned(run) == pytest.approx(learned(straight), rel=1e-4)
    made_by_two = (run.default_adapters / "policy-v000004" / "manifest.json").stat().st_ino
    assert resume_trainer(run, 1, at=4) == 4
    # Publishing an existing version again keeps it if it is equal, and raises SyncFailed if not.
    assert (run.default_adapters / "policy-v000004" / "manifest.json").stat().st_ino == made_by_two


def test_the_trainer_refuses_a_checkpoint_damaged_after_the_parents_check(
    straight: RunDir, tmp_path: Path
) -> None:
    run = copy_of(straight, tmp_path / "copy")
    weights_file = run.checkpoint_path(4) / "policy-exp_avg.safetensors"
    content = bytearray(weights_file.read_bytes())
    content[-1] ^= 1
    weights_file.write_bytes(content)
    with pytest.raises(ModelError, match="policy-exp_avg"):
        choose_checkpoint(run, 4)
    assert ended(run, 1, resume=True) == 1
    assert "policy-exp_avg.safetensors has sha256" in run.read_json(run.trainer_error_path)["what"]


def test_a_replay_gives_the_published_adapter(
    straight: RunDir, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copy_of(straight, tmp_path / "copy")
    replay(run.root, 3)
    assert capsys.readouterr().out.startswith(
        "equal: step 3 again from checkpoint step-000002 gives the published adapter bit for bit"
    )
    assert [a.version for a in published_versions(run.default_adapters)] == [0, 1, 2, 3, 4], (
        "the run itself is only read"
    )


def test_a_step_without_its_adapter_or_rollouts_cannot_be_replayed(straight: RunDir, tmp_path: Path) -> None:
    run = copy_of(straight, tmp_path / "copy")
    with pytest.raises(ConfigError, match="holds no policy-v000007 to compare with"):
        replay(run.root, 7)
    run.rollout_path(3).unlink()
    with pytest.raises(ConfigError, match="no rollouts of step 3; a replay of step 4 needs them"):
        replay(run.root, 4)
