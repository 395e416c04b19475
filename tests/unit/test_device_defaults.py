"""What skylite chooses for the device where nobody set it; config.json records each choice and its reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skylite.config.loading import read_run_config
from skylite.config.train import TrainConfig
from skylite.processes import hardware
from skylite.rollout.plan import device_defaults
from skylite.run.run_dir import RunDir
from tests.settings import load_config
from tests.unit.bad_inputs import call
from tests.unit.run_cases import begin, make_model, write_data

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


def trainer(**settings: Any) -> TrainConfig:
    return TrainConfig.model_validate({"trainer": settings})


def test_a_cpu_gets_smaller_micro_batches_unless_someone_sets_them() -> None:
    chosen, notes = device_defaults(trainer(num_threads=1), "cpu")
    assert chosen.trainer.tokens_per_micro_batch == 2048
    assert notes == [
        "trainer.tokens_per_micro_batch=2048: larger ones are slower on a CPU and need more memory"
    ]
    for given in (4096, "auto", 100):
        config = trainer(num_threads=1, tokens_per_micro_batch=given)
        assert device_defaults(config, "cpu") == (config, [])


def test_a_gpu_keeps_the_default_and_says_so() -> None:
    chosen, notes = device_defaults(trainer(num_threads=1), "cuda")
    assert chosen.trainer.tokens_per_micro_batch == 4096
    assert notes == ["trainer.tokens_per_micro_batch=4096: the default on a GPU"]


@pytest.mark.parametrize(("quota", "ranks", "threads"), [("400000 100000", 1, 4), ("400000 100000", 3, 1)])
def test_threads_follow_the_cores_that_a_container_may_use(
    quota: str, ranks: int, threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text(quota)
    monkeypatch.setattr(hardware, "CGROUP_CPU", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    config = trainer(num_ranks=ranks, tokens_per_micro_batch=64)
    assert hardware.threads_per_rank(ranks) == threads
    chosen, notes = device_defaults(config, "cpu")
    assert chosen.trainer.num_threads is None, "a resume on another machine computes them again"
    assert notes == [f"{threads} CPU threads per rank: 4 usable cores, {ranks} rank(s)"]
    chosen, _ = device_defaults(
        trainer(num_ranks=ranks, deterministic=True, tokens_per_micro_batch=64), "cpu"
    )
    assert chosen.trainer.num_threads == threads


@pytest.mark.usefixtures("machine")
def test_the_choices_are_in_config_json(tmp_path: Path) -> None:
    run: RunDir = begin(tmp_path)
    recorded = read_run_config(run.config_path)
    assert recorded.config.trainer.tokens_per_micro_batch == 2048
    notes = "\n".join(map(str, recorded.resolved.notes))
    for part in (
        "tokens_per_micro_batch=2048: larger",
        "CPU threads per rank: ",
        f"dtype {recorded.resolved.placement.dtype}",
    ):
        assert part in notes


def test_every_bundled_recipe_names_the_rank() -> None:
    assert len(RECIPES) >= 3
    for path in RECIPES:
        assert {"rank", "alpha"} <= load_config(path, {}).lora.model_fields_set, path


@pytest.mark.usefixtures("machine")
def test_a_recipe_and_data_are_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`skylite train --recipe X --data D` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    make_model(tmp_path / "model")
    write_data(tmp_path / "d", 8)
    Path("mine.yaml").write_text("model: {name: model}\nlora: {rank: 4, alpha: 8}\nnum_steps: 3\n")
    reply = call(["train", "--recipe", "mine.yaml", "--data", "d", "--dry-run"])
    assert reply.code == 0, reply.output
    for part in ('"rank": 4', '"alpha": 8.0', '"tokens_per_micro_batch": 2048', '"num_steps": 3'):
        assert part in reply.output
