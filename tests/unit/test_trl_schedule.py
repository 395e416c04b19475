"""docs/how-to/coming-from.md: TRL's GRPOTrainer makes the generations and updates that the page states."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skylite.config.loading import load_config
from skylite.config.train import TrainConfig
from tests.tiny_models import make_tiny_model
from tests.unit.doc_blocks import ROOT, blocks
from tests.unit.peer_code import load_trl

PAGE = ROOT / "docs" / "how-to" / "coming-from.md"


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    return load_trl()


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def sizes(config: Any) -> dict[str, Fraction]:
    """Our settings for a GRPOConfig, by the rows of the page's table."""
    updates = Fraction(
        config.steps_per_generation * config.num_iterations, config.gradient_accumulation_steps
    )
    return {
        "prompts_per_step": Fraction(config.generation_batch_size, config.num_generations),
        "group_size": Fraction(config.num_generations),
        "updates_per_step": updates,
        "num_steps": config.max_steps / updates,
    }


def on_a_cpu(config: Any, **settings: Any) -> Any:
    return config(**settings, use_cpu=True, bf16=False, report_to="none", disable_tqdm=True)


def train(trl: SimpleNamespace, tiny: Path, folder: Path, config: Any) -> list[tuple[int, list[str]]]:
    """Train for config.max_steps updates. Returns the updates before each generation, and its prompts."""
    from datasets import Dataset

    generations: list[tuple[int, list[str]]] = []

    def reward(prompts: list[str], completions: list[str], trainer_state: Any, **_: Any) -> list[float]:
        generations.append((trainer_state.global_step, list(prompts)))
        return [float(len(text)) for text in completions]

    data = Dataset.from_dict({"prompt": [f"prompt {i}" for i in range(64)]})
    trainer = trl.trainer.GRPOTrainer(str(tiny), reward, args=config, train_dataset=data)
    trainer.train()
    assert trainer.state.global_step == config.max_steps
    return generations


@pytest.mark.parametrize(
    "settings",
    [
        # 16 completions a device batch of 2 = 8 batches: an update each, then all in one, then two halves.
        {"generation_batch_size": 16, "max_steps": 16},
        {"generation_batch_size": 16, "gradient_accumulation_steps": 8, "max_steps": 2},
        {"generation_batch_size": 16, "gradient_accumulation_steps": 4, "max_steps": 4},
        {"steps_per_generation": 4, "num_iterations": 2, "max_steps": 16},
        {"gradient_accumulation_steps": 4, "max_steps": 2},
    ],
    ids=["update each", "one update", "two updates", "two passes", "default"],
)
def test_trl_generates_and_updates_as_the_table_states(
    trl: SimpleNamespace, tiny: Path, tmp_path: Path, settings: dict[str, Any]
) -> None:
    config = on_a_cpu(
        trl.trainer.GRPOConfig,
        output_dir=str(tmp_path),
        per_device_train_batch_size=2,
        num_generations=2,
        max_completion_length=2,
        **settings,
    )
    ours = sizes(config)
    generations = train(trl, tiny, tmp_path, config)
    assert len(generations) == ours["num_steps"]
    assert [updates for updates, _ in generations] == [
        k * ours["updates_per_step"] for k in range(len(generations))
    ]
    for _, prompts in generations:
        assert len(set(prompts)) == ours["prompts_per_step"]
        assert len(prompts) == ours["prompts_per_step"] * ours["group_size"]
    seen = {prompt for _, prompts in generations for prompt in prompts}
    assert len(seen) == ours["prompts_per_step"] * ours["num_steps"]


@pytest.fixture
def script(trl: SimpleNamespace, tmp_path: Path) -> dict[str, Any]:
    """The arguments that the page's script gives to GRPOTrainer."""
    from peft import LoraConfig

    (source,) = [block.text for block in blocks(PAGE) if block.language == "python"]
    given: dict[str, Any] = {}

    class Trainer:
        def __init__(self, **arguments: Any) -> None:
            given.update(arguments)

        def train(self) -> None:
            pass

    names = {
        "GRPOTrainer": Trainer,
        "GRPOConfig": lambda **settings: on_a_cpu(
            trl.trainer.GRPOConfig, output_dir=str(tmp_path), **settings
        ),
        "LoraConfig": LoraConfig,
        "my_reward": len,
        "dataset": [],
    }
    exec(source, names)  # the page's own text
    return given


def test_the_recipe_is_the_run_of_the_script(script: dict[str, Any], tmp_path: Path) -> None:
    (recipe,) = [block.text for block in blocks(PAGE) if block.language == "toml"]
    (tmp_path / "recipe.toml").write_text(recipe, encoding="utf-8")
    ours: TrainConfig = load_config(tmp_path / "recipe.toml", {})
    args, lora = script["args"], script["peft_config"]
    assert sizes(args) == {
        "prompts_per_step": ours.rollout.prompts_per_step,
        "group_size": ours.rollout.group_size,
        "updates_per_step": ours.algorithm.updates_per_step,
        "num_steps": ours.num_steps,
    }
    assert script["model"] == ours.model.name
    assert (lora.r, lora.lora_alpha) == (ours.lora.rank, ours.lora.alpha)
    assert args.max_completion_length == ours.rollout.max_completion_tokens
    assert (args.epsilon, args.epsilon_high) == (ours.algorithm.clip_eps_low, ours.algorithm.clip_eps_high)
    assert (args.learning_rate, args.lr_scheduler_type) == (ours.optim.lr, ours.optim.schedule)
    assert (args.beta, args.temperature, args.max_grad_norm) == (
        ours.algorithm.kl_coef,
        ours.rollout.temperature,
        ours.optim.max_grad_norm,
    )
    assert (args.loss_type, ours.algorithm.aggregation) == ("dapo", "token-mean")
    assert args.vllm_importance_sampling_mode == "sequence_mask"
    assert (ours.importance.mode, ours.importance.level) == ("mask", "sequence")
    assert args.vllm_importance_sampling_clip_max == ours.importance.cap
