"""What a run prints about its memory: a warning in words, with the setting that helps, if it will not fit."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import pytest

from skylite.cli.train_defaults import find_recipe
from skylite.config.train import TrainConfig
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.errors import ConfigError, DoesNotFit
from skylite.notes import Note, log_notes
from skylite.resources import gpu_memory_plan
from skylite.resources.gpu_memory_plan import (
    Setup,
    checkpointing_default,
    plan_memory,
    replicate_default,
    trainer_memory,
)
from skylite.resources.gpu_placement import place
from skylite.rollout.plan import device_defaults
from tests.fakes.launcher import FakeLauncher
from tests.settings import load_config
from tests.unit.doc_scripts import script
from tests.unit.gpu_cases import Machine

H100 = "NVIDIA H100 80GB HBM3, 9.0, 81559, 580.95.05, Disabled"
SMALL = {"max_prompt_tokens": 512, "max_completion_tokens": 1024}
GIB = 2**30


def settings(**sections: Any) -> TrainConfig:
    return TrainConfig.model_validate({"rollout": SMALL} | sections)


def rank_note_of_7b(machine: Machine, folder: Path, config: TrainConfig, *cards: str) -> Note:
    """The note on a rank of a run with Qwen2.5-7B's shapes on these GPUs."""
    machine.lists(*cards)
    machine.has_torch()
    folder.mkdir(exist_ok=True)
    model = script("generate_gpu_fit").write_shapes(folder, "7B")
    return plan_memory(
        config, Setup(VllmLauncher(), model, "cuda", "bfloat16", "dense", place(config, "cuda"))
    )[1][1]


def note_of_7b(machine: Machine, folder: Path, config: TrainConfig, *cards: str) -> str:
    """What a run with Qwen2.5-7B's shapes prints about a rank on these GPUs."""
    return str(rank_note_of_7b(machine, folder, config, *cards))


@pytest.mark.parametrize(
    ("shape", "trainer", "chosen", "because"),
    [
        ("0.5B", {}, "none", "8192 tokens fits"),
        ("7B", {}, "selective", "8192 tokens fits"),
        ("7B", {"tokens_per_micro_batch": 3000}, "none", "3000 tokens fits"),
        ("7B", {"tokens_per_micro_batch": 30000}, "full", "no micro-batch of 30000 tokens fits"),
    ],
)
def test_the_least_recomputation_with_which_a_micro_batch_fits_is_chosen(
    machine: Machine, tmp_path: Path, shape: str, trainer: dict[str, Any], chosen: str, because: str
) -> None:
    """Trainer and vLLM share 80 GB. Without this rule, 7B would be refused or run out of memory at 30,000."""
    machine.lists(H100)
    machine.has_torch()
    model = script("generate_gpu_fit").write_shapes(tmp_path, shape)
    sizes = {"attention": "flex", "tokens_per_micro_batch": "auto"} | trainer
    config = settings(trainer=sizes)
    where: tuple[Any, ...] = (model, "cuda", "bfloat16", "dense", place(config, "cuda"))
    found, note = checkpointing_default(config, Setup(VllmLauncher(), *where))
    assert found == settings(trainer=sizes | {"checkpointing": chosen})
    assert note.startswith(f"trainer.checkpointing={chosen}: ")
    assert because in note
    assert plan_memory(found, Setup(VllmLauncher(), *where))[1][1].level != "warning"
    own = settings(trainer=sizes | {"checkpointing": "selective"})
    assert checkpointing_default(own, Setup(VllmLauncher(), *where)) == (own, "")
    on_cpu: tuple[Any, ...] = (model, "cpu", "float32", "dense", where[-1])
    assert checkpointing_default(config, Setup(VllmLauncher(), *on_cpu)) == (config, "")


@pytest.mark.parametrize(("shape", "whole"), [("0.5B", True), ("7B", True), ("14B", False)])
def test_each_rank_holds_the_whole_base_where_a_micro_batch_fits_beside_it(
    machine: Machine, tmp_path: Path, shape: str, whole: bool
) -> None:
    """Two GPUs of 80 GB train, two sample. 14B would then need to recompute for 8,192 tokens."""
    machine.lists(*([H100] * 4))
    machine.has_torch()
    model = script("generate_gpu_fit").write_shapes(tmp_path, shape)
    several: dict[str, Any] = {"engine": {"num_engines": 2, "gpu_memory_utilization": 0.9}}
    sizes: dict[str, Any] = {"attention": "flex", "tokens_per_micro_batch": "auto", "num_ranks": 2}
    config = settings(trainer=sizes, **several)
    setup = Setup(VllmLauncher(), model, "cuda", "bfloat16", "dense", place(config, "cuda"))
    config, _ = checkpointing_default(config, setup)
    found, note = replicate_default(config, setup)
    assert found.trainer.replicate_base == whole
    assert bool(note) == whole
    assert plan_memory(found, setup)[1][1].level != "warning"
    weights = trainer_memory(setup.sizes(found), found, "cuda", "bfloat16").weights
    assert (weights == 2 * setup.sizes(found).parameters) == whole
    own = settings(trainer=sizes | {"replicate_base": False}, **several)
    assert replicate_default(own, setup) == (own, "")
    alone = settings(trainer=sizes | {"num_ranks": 1}, **several)
    assert replicate_default(alone, setup) == (alone, "")


def test_a_replicated_base_is_not_offloaded() -> None:
    with pytest.raises(ValueError, match="set only one"):
        settings(trainer={"replicate_base": True, "offload": True})


@pytest.mark.parametrize(
    ("recipe", "shape"),
    [
        ("gsm8k", "0.5B"),
        ("own_data", "0.5B"),
        ("gsm8k_1_5b", "1.5B"),
        ("gsm8k_qwen3_4b", "7B"),  # larger than Qwen3-4B in all sizes but the heads'
        ("gsm8k_7b", "7B"),
    ],
)
def test_the_recipes_for_one_gpu_fit_80_gb(machine: Machine, tmp_path: Path, recipe: str, shape: str) -> None:
    machine.lists(H100)
    machine.has_torch()
    model = script("generate_gpu_fit").write_shapes(tmp_path, shape)
    config, _ = device_defaults(load_config(find_recipe(recipe), {}), "cuda")
    where: tuple[Any, ...] = (model, "cuda", "bfloat16", "dense", place(config, "cuda"))
    config, _ = checkpointing_default(config, Setup(VllmLauncher(), *where))
    assert config.trainer.checkpointing in ("none", "selective")
    memory, notes = plan_memory(config, Setup(VllmLauncher(), *where))
    assert not [note for note in notes if note.is_warning]
    assert memory.trainer_bytes
    held = int(re.search(r"for (\d+) tokens\)", str(notes[0]))[1])  # type: ignore[index]
    assert held >= 64 * config.max_sequence_tokens, "of 64 sequences at once, all of the longest length"


def test_a_micro_batch_that_will_not_fit_is_a_warning(
    machine: Machine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """7B with 16,384 tokens on 80 GB, which the trainer shares with vLLM."""
    config = settings(trainer={"tokens_per_micro_batch": 16384})
    note = note_of_7b(machine, tmp_path / "m", config, H100)
    assert re.fullmatch(
        r"warning: memory of a rank: about 8\d\.\d GiB of \d\d\.\d GiB at 16384 tokens per micro-batch "
        r"\(weights 14\.2 GiB, .*\), up to .* GiB if many completions are short, so a step may run out of "
        r"memory; skylite then halves its micro-batches. Set trainer\.tokens_per_micro_batch=5100, which "
        r"fits at all lengths of completions, or auto, which measures",
        note,
    ), note
    caplog.set_level(logging.INFO)
    log_notes([rank_note_of_7b(machine, tmp_path / "m", config, H100)])
    assert [record.levelname for record in caplog.records] == ["WARNING"]


@pytest.mark.parametrize(("tokens", "warns"), [(5000, False), (5500, True), ("auto", False)])
def test_the_setting_in_the_warning_helps(
    machine: Machine, tmp_path: Path, tokens: int | str, warns: bool
) -> None:
    config = settings(trainer={"tokens_per_micro_batch": tokens})
    note = note_of_7b(machine, tmp_path / "m", config, H100)
    assert note.startswith("warning: " if warns else "memory of a rank: about "), note
    if warns:
        assert re.search(r"up to \d\d\.\d GiB if many completions are short, so a step may run out of", note)


def test_a_refused_run_names_settings_that_help(machine: Machine, tmp_path: Path) -> None:
    rollout = {"max_prompt_tokens": 512, "max_completion_tokens": 30_000}
    with pytest.raises(ConfigError) as refused:
        note_of_7b(machine, tmp_path / "m", settings(rollout=rollout), H100)
    assert refused.value.hint == (
        "Use trainer.checkpointing=full, a smaller rollout.max_completion_tokens, engine.sleep=weights, a "
        "lower engine.gpu_memory_utilization, more ranks, each on its own GPU (trainer.num_ranks) or "
        "trainer.offload=true."
    )


def test_a_refused_episode_names_its_own_limit(machine: Machine, tmp_path: Path) -> None:
    config = settings(env={"episode": "guess", "max_tokens": 30_000})
    with pytest.raises(ConfigError, match=r"a smaller env\.max_tokens") as error:
        note_of_7b(machine, tmp_path / "m", config, H100)
    assert "rollout.max_completion_tokens" not in str(error.value)


def cpu_note(patch: pytest.MonkeyPatch, folder: Path, free_gib: float, **sections: Any) -> str:
    """What a CPU run of Qwen2.5-0.5B's shapes prints with so much free memory."""
    patch.setattr(gpu_memory_plan, "available_memory", lambda: int(free_gib * GIB))
    folder.mkdir(exist_ok=True)
    model, config = script("generate_gpu_fit").write_shapes(folder, "0.5B"), settings(**sections)
    budget, notes = plan_memory(
        config, Setup(VllmLauncher(), model, "cpu", "float32", "dense", place(config, "cpu"))
    )
    assert (budget.kv_cache_bytes, budget.trainer_bytes) == (None, None)
    return str(notes[0])


def test_a_cpu_run_tells_what_it_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note = cpu_note(monkeypatch, tmp_path / "m", 200)
    assert re.match(r"memory: about \d+\.\d GiB of 200\.0 GiB free; 1 engine\(s\) of ", note)


def test_the_setting_in_the_warning_of_a_cpu_run_helps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = cpu_note(monkeypatch, tmp_path / "m", 40, trainer={"tokens_per_micro_batch": 65536})
    assert re.match(
        r"warning: memory: the run needs about \d+\.\d GiB, more than the 40\.0 GiB that are free \(1 engine",
        note,
    ), note
    remedy = re.search(r", so it will probably run out of memory; set trainer\.(\S+)=(\d+)$", note)
    assert remedy, note
    again = cpu_note(monkeypatch, tmp_path / "m", 40, trainer={remedy[1]: int(remedy[2])})
    assert again.startswith("memory: about ")


def test_a_cpu_run_that_no_single_setting_saves_names_all_that_help(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    note = cpu_note(monkeypatch, tmp_path / "m", 2)
    assert note.endswith(
        "; use trainer.checkpointing=full, a smaller rollout.max_completion_tokens, a smaller "
        "engine.kv_cache_gib, fewer ranks or engines or a smaller model"
    ), note


def test_several_policies_that_do_not_fit_are_refused_on_a_cpu_too(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Rank 128 of the 0.5B has 70 million parameters, 1.8 GiB with gradient and moments."""
    lora = {"rank": 128}
    assert cpu_note(monkeypatch, tmp_path / "m", 30, lora=lora).startswith("memory: about ")
    with pytest.raises(DoesNotFit, match=r"16 policies at once do not fit \(memory: the run needs about "):
        cpu_note(monkeypatch, tmp_path / "m", 30, lora=lora, engine={"policies": 16})


def test_the_engines_part_is_the_launchers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The fake engine takes 0.2 GiB; a run without engines, nothing."""
    folder = tmp_path / "m"
    folder.mkdir()
    model = script("generate_gpu_fit").write_shapes(folder, "0.5B")
    for name, engines, text in (
        ("grpo", 1, "; 1 engine(s) of 1.2 GiB (weights 0."),
        ("sft", 0, "; 1 rank(s)"),
    ):
        engine = {"num_engines": engines, "kv_cache_gib": 1}
        config = settings(engine=engine, algorithm={"name": name})
        _, (note,) = plan_memory(
            config, Setup(FakeLauncher(), model, "cpu", "float32", "dense", place(config, "cpu"))
        )
        assert text in note.text
