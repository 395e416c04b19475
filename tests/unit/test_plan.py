"""A plan: what it refuses on any machine, what it chooses for the device, and what it says about both."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skylite.config.loading import read_run_config
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.engine.start_engines import cores_beside_trainer
from skylite.errors import ConfigError
from skylite.notes import warning
from skylite.processes import hardware
from skylite.rollout import plan as plan_module
from skylite.rollout.plan import device_defaults, held_out_note, plan_run, settings_notes
from skylite.run.run_dir import RunDir
from tests.settings import load_config
from tests.unit.bad_inputs import call
from tests.unit.data_cases import prompt
from tests.unit.run_cases import begin, make_model, write_data


def config_with_data(folder: Path, **sections: Any) -> TrainConfig:
    info = PromptFileInfo(
        dataset="t",
        source_kind="generated",
        source="t",
        source_sha256="0",
        count=1,
        seed=0,
        split="train",
        reward="math",
        system="",
        few_shot=[],
    )
    write_rows(folder / "train.parquet", [prompt()], info)
    return TrainConfig.model_validate({"data": {"path": str(folder)}, "eval": {"limit": 0}} | sections)


@pytest.mark.parametrize("trainer", [{"attention": "flex"}, {"offload": True}])
@pytest.mark.usefixtures("machine")
def test_gpu_settings_are_refused_without_a_gpu(trainer: dict[str, Any], tmp_path: Path) -> None:
    config = config_with_data(tmp_path / "data", trainer=trainer)
    name, value = next(iter(trainer.items()))
    with pytest.raises(ConfigError, match=f"trainer.{name}={str(value).lower()} .*GPU"):
        plan_run(config, RunDir(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


@pytest.mark.usefixtures("machine")
def test_a_plan_tells_what_triton_lacks(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_module, "triton_note", lambda device: warning(f"asked for {device}"))
    config = config_with_data(
        tmp_path / "data", model={"name": str(tiny_llama)}, rollout={"prompts_per_step": 1}
    )
    assert "warning: asked for cpu" in map(str, plan_run(config, RunDir(tmp_path / "run")).resolved.notes)


@pytest.mark.parametrize(
    ("lora", "scale"),
    [
        ({"rank": 32, "alpha": 32}, "scaled by 1 (alpha / rank)"),
        ({"rank": 8, "alpha": 32}, "scaled by 4 (alpha / rank)"),
        ({"rank": 64, "alpha": 32}, "scaled by 0.5 (alpha / rank)"),
        ({"rank": 64, "alpha": 32, "use_rslora": True}, "scaled by 4 (alpha / sqrt(rank))"),
    ],
)
def test_the_scale_of_the_update_is_printed(lora: dict[str, object], scale: str) -> None:
    notes = [*map(str, settings_notes(TrainConfig.model_validate({"lora": lora})))]
    assert [scale in note for note in notes].count(True) == 1


@pytest.mark.parametrize(("count", "points"), [(1, 40), (10, 26), (49, 13)])
def test_too_few_held_out_problems_are_a_warning_with_their_interval(count: int, points: int) -> None:
    note = str(held_out_note([prompt(id=str(i)) for i in range(count)]))
    assert note.startswith(f"warning: {count} held-out problem(s) are too few")
    assert f"+-{points} points" in note


def test_enough_none_or_unscored_held_out_problems_are_no_warning() -> None:
    assert held_out_note([]) is None
    assert held_out_note([prompt(id=str(i)) for i in range(50)]) is None
    assert held_out_note([prompt(id="a", answer="")]) is None, (
        "a reward has no interval before it is measured"
    )


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


def test_a_gpu_measures_its_micro_batches_and_says_so() -> None:
    chosen, notes = device_defaults(trainer(num_threads=1), "cuda")
    assert chosen.trainer.tokens_per_micro_batch == "auto"
    assert chosen.trainer.attention == "flex"
    assert notes == [
        "trainer.tokens_per_micro_batch=auto: the default on a GPU; the trainer measures how many fit",
        "trainer.attention=flex: the default on a GPU",
    ]


@pytest.mark.parametrize("attention", ["sdpa", "flex"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_an_attention_that_someone_set_holds(attention: str, device: Any) -> None:
    config = trainer(num_threads=1, tokens_per_micro_batch=64, attention=attention)
    assert device_defaults(config, device) == (config, [])


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


@pytest.mark.parametrize(("ranks", "threads", "engine"), [(1, 3, 3), (2, 1, 4), (6, 1, 1)])
def test_trainer_and_engine_of_a_sweep_on_a_cpu_share_the_cores(
    ranks: int, threads: int, engine: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "cpu.max").write_text("600000 100000")
    monkeypatch.setattr(hardware, "CGROUP_CPU", tmp_path / "cpu.max")
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(64)))
    alone = trainer(num_ranks=ranks, tokens_per_micro_batch=64)
    sweep = alone.model_copy(update={"engine": alone.engine.model_copy(update={"policies": 2})})
    chosen, _ = device_defaults(sweep, "cpu")
    assert (chosen.trainer.num_threads, cores_beside_trainer(chosen)) == (threads, engine)
    assert cores_beside_trainer(device_defaults(alone, "cpu")[0]) is None
    assert device_defaults(sweep, "cuda")[0].trainer.num_threads is None


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
