"""What ranks of another machine do with files that they see late: rank 0 reads, and shares what it read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from skylite.config.train import RunConfig
from skylite.model.process_group import Dist
from skylite.rollout import run_session
from skylite.run.run_dir import RunDir
from skylite.trainer import micro_batch_memory
from skylite.trainer.checkpoint import save_checkpoint
from skylite.trainer.loop import restore
from skylite.trainer.trainer import Trainer, make_trainer
from tests.cases import policy_of, train_rows
from tests.decisions import resolved
from tests.rows import random_samples
from tests.small_run import settings


class Recorded:
    """Rank 0 when it first runs, then rank 1, which gets what rank 0 sent."""

    def __init__(self, sent: list[Any], is_main: bool) -> None:
        self.sent, self.is_main, self.dp_size, self.device = sent, is_main, 2, torch.device("cpu")

    def share(self, value: Any) -> Any:
        if self.is_main:
            self.sent.append(value)
            return value
        assert value is None
        return self.sent.pop(0)

    def broadcast_(self, values: Tensor) -> Tensor:
        if self.is_main:
            self.sent.append(values.detach().clone())
        else:
            values.detach().copy_(self.sent.pop(0))
        return values


def trainer_of(model: Path, dist: Dist) -> Trainer:
    config = settings(optim={"lr": 1e-2})
    return make_trainer(policy_of(model, config, dist), config, dist)


def trained(model: Path, dist: Dist, *folders: RunDir) -> Trainer:
    """A trainer after the last of the steps; a checkpoint of each step is in its folder."""
    trainer = trainer_of(model, dist)
    for step, run in enumerate(folders, 1):
        train_rows(trainer.policy, trainer.optimizer, random_samples(step), step, trainer.config, dist)
        run.checkpoints.mkdir(parents=True, exist_ok=True)
        save_checkpoint(run, step, trainer.config, [trainer.optimizer], {"pace": step / 3})
    return trainer


@pytest.mark.parametrize("seen", ["an older checkpoint", "none"])
def test_all_ranks_resume_from_the_checkpoint_that_rank_0_sees(
    seen: str, tiny_llama: Path, tmp_path: Path, dist: Dist
) -> None:
    here, there = RunDir(tmp_path / "here"), RunDir(tmp_path / "there")
    expected = trained(tiny_llama, dist, there, here)
    view = there if seen == "an older checkpoint" else RunDir(tmp_path / "empty")
    sent: list[Any] = []
    for is_main, run in ((True, here), (False, view)):
        rank: Any = Recorded(sent, is_main)
        trainer = replace(trainer_of(tiny_llama, dist), dist=rank)
        state: Any = SimpleNamespace(run=run, dist=trainer.dist, trainer=trainer)
        assert restore(state) == 2
        assert trainer.learned == {"pace": 2 / 3}
        for name, parameter in trainer.optimizer.params.items():
            other = expected.optimizer.params[name]
            assert torch.equal(parameter, other), name
            moments, known = trainer.optimizer.adamw.state[parameter], expected.optimizer.adamw.state[other]
            assert all(torch.equal(moments[key], known[key]) for key in ("step", "exp_avg", "exp_avg_sq"))
    assert sent == []


def test_all_ranks_measure_with_the_longest_prompt_that_rank_0_reads(
    tiny_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(trainer={"tokens_per_micro_batch": "auto"})
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(tiny_llama, tmp_path))
    longest: list[int] = []

    def measure(policy: object, config: object, prompt: int, dist: object) -> tuple[int, str]:
        longest.append(prompt)
        return 64, ""

    monkeypatch.setattr(micro_batch_memory, "measure_micro_batch_tokens", measure)
    (tmp_path / "canary.json").write_text('{"sequences": [], "longest_prompt_tokens": 20}')
    sent: list[Any] = []
    policy: Any = None
    for is_main, run in ((True, RunDir(tmp_path)), (False, RunDir(tmp_path / "empty"))):
        rank: Any = Recorded(sent, is_main)
        micro_batch_memory.resolve_micro_batch_tokens(run, run_config, policy, rank)
    assert longest == [20, 20]


def test_files_of_another_machine_do_not_hinder_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The rendezvous holds what this machine does not see, and so does not remove."""
    run = RunDir(tmp_path)
    run.rendezvous.mkdir()
    (run.rendezvous / "abc-host-1").touch()
    monkeypatch.setattr(run_session, "remove_tree", lambda _: OSError(39, "Directory not empty"))
    plan: Any = SimpleNamespace(run=run)
    run_session.clear_control_files(plan)
    assert list(run.rendezvous.iterdir()) == []
    assert run.rendezvous.stat().st_mode & 0o777 == 0o700
