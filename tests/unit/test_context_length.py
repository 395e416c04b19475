"""Settings that need more tokens than the model was made for are refused before anything starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from skylite.engine.model_limits import check_context, context_length
from skylite.errors import ConfigError
from tests.small_run import settings
from tests.unit.bad_inputs import call


def model(folder: Path, **config: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def lengths(prompt: int, completion: int) -> dict[str, Any]:
    return {"rollout": {"max_prompt_tokens": prompt, "max_completion_tokens": completion}}


@pytest.mark.parametrize(
    "config",
    [
        {"max_position_embeddings": 1024},
        {"n_positions": 1024},
        {"text_config": {"max_position_embeddings": 1024}},
        {"max_position_embeddings": 1024, "rope_scaling": None, "rope_parameters": {"rope_type": "default"}},
    ],
    ids=["usual", "GPT-2", "with images", "RoPE without a factor"],
)
def test_the_last_length_that_fits_is_accepted(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = model(tmp_path, **config)
    assert context_length(folder) == 1024
    check_context(settings(**lengths(1000, 24)), folder)
    with pytest.raises(ConfigError) as refused:
        check_context(settings(**lengths(1000, 25)), folder)
    assert "rollout.max_prompt_tokens=1000 and rollout.max_completion_tokens=25 allow 1,025" in str(
        refused.value
    )
    assert "made for 1,024" in str(refused.value)


def test_an_episode_is_as_long_as_its_own_limit(tmp_path: Path) -> None:
    config = settings(env={"episode": "guess", "max_tokens": 2000})
    with pytest.raises(ConfigError, match=r"env\.max_tokens=2000 allow"):
        check_context(config, model(tmp_path, max_position_embeddings=1024))


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_position_embeddings": None},
        {"max_position_embeddings": 1024, "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"max_position_embeddings": 1024, "rope_parameters": {"full_attention": {"factor": 8.0}}},
    ],
    ids=["no length", "null", "scaled", "scaled in some layers"],
)
def test_lengths_that_only_vllm_knows_are_left_to_it(tmp_path: Path, config: dict[str, Any]) -> None:
    check_context(settings(**lengths(1000, 1000)), model(tmp_path, **config))


def test_train_refuses_it_in_a_sentence(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert call(["prepare", "gsm8k", "--synthetic", "--out", "data"]).code == 0
    words = ["train", "--recipe", "gsm8k_cpu", "--model", str(tiny_llama), "--data", "data"]
    refused = call([*words, "--set", "rollout.max_completion_tokens=2048", "--dry-run"])
    assert refused.code == 2, refused.output
    assert "made for 2,048" in refused.output
    assert not (tmp_path / "runs").exists()
