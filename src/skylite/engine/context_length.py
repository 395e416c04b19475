"""How many tokens a model was made for, and settings that need more: vLLM would refuse them at its start."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from skylite.config.train import TrainConfig
from skylite.engine.server_command import ENGINE_COMMAND
from skylite.errors import ConfigError
from skylite.untrusted_text import parse_json

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names in config.json for the tokens of the longest sequence."""
ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""vLLM's variable for a user who knows better."""


def context_length(model_path: Path) -> int | None:
    """Tokens, before a factor that scales positions; None where config.json does not say."""
    lengths = [section[name] for section in _sections(model_path) for name in LENGTHS if name in section]
    return min((length for length in lengths if type(length) is int and length > 0), default=None)


def check_context(config: TrainConfig, model_path: Path) -> None:
    """Raise ConfigError if a prompt and its completion may be longer than the model's context.

    Where a factor scales positions (RoPE scaling), vLLM decides.
    """
    longest = context_length(model_path)
    needed = config.max_sequence_tokens
    if longest is None or needed <= longest or {ENGINE_COMMAND, ALLOW_LONGER} & os.environ.keys():
        return
    if any(factor for section in _sections(model_path) for factor in _factors(section)):
        return
    rollout = config.rollout
    if config.env.episode:
        settings = f"env.max_tokens={needed}"
    else:
        settings = (
            f"rollout.max_prompt_tokens={rollout.max_prompt_tokens} and "
            f"rollout.max_completion_tokens={rollout.max_completion_tokens}"
        )
    raise ConfigError(
        f"{settings} allow {needed:,} tokens, and {model_path.name} was made for {longest:,}.",
        f"Lower {'it' if config.env.episode else 'one of them'}.",
    )


def _sections(model_path: Path) -> list[dict[str, Any]]:
    config = parse_json((model_path / "config.json").read_text(encoding="utf-8"))
    return [section for section in (config, config.get("text_config")) if isinstance(section, dict)]


def _factors(section: Mapping[str, Any]) -> Iterator[Any]:
    """The factors of RoPE scaling, one for each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = section.get(name)
        if isinstance(scaling, dict):
            yield scaling.get("factor")
            yield from (inner.get("factor") for inner in scaling.values() if isinstance(inner, dict))
