"""How many tokens a model was made for, and settings that need more: vLLM would refuse them at its start."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skylite.config.train import TrainConfig
from skylite.engine.tensor_parallel import text_section
from skylite.engine.vllm.server_command import ENGINE_COMMAND
from skylite.errors import ConfigError
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names in config.json for the tokens of the longest sequence."""
ALLOW_LONGER = "VLLM_ALLOW_LONG_MAX_MODEL_LEN"
"""vLLM's variable for a user who knows better."""


def context_length(model_path: Path) -> int | None:
    """Tokens, before a factor that scales positions; None where config.json does not say."""
    return _length(_sections(model_path))


def check_context(config: TrainConfig, model_path: Path) -> None:
    """Raise ConfigError if a prompt and its completion may be longer than the model's context.

    Where a factor scales positions (RoPE scaling), vLLM decides.
    """
    sections, needed = _sections(model_path), config.max_sequence_tokens
    longest = _length(sections)
    if longest is None or needed <= longest or {ENGINE_COMMAND, ALLOW_LONGER} & os.environ.keys():
        return
    if any(factor for section in sections for factor in _factors(section)):
        return
    raise ConfigError(
        f"{config.source.limits} {needed:,} tokens, and {model_path.name} was made for {longest:,}.",
        "Lower the limit.",
    )


def _sections(model_path: Path) -> tuple[Mapping[str, Any], ...]:
    config = parse_json(read_text(model_path / "config.json"))
    return config, text_section(config)


def _length(sections: Iterable[Mapping[str, Any]]) -> int | None:
    lengths = [section[name] for section in sections for name in LENGTHS if name in section]
    return min((length for length in lengths if type(length) is int and length > 0), default=None)


def _factors(section: Mapping[str, Any]) -> Iterator[Any]:
    """The factors of RoPE scaling, one for each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = section.get(name)
        if isinstance(scaling, dict):
            yield scaling.get("factor")
            yield from (inner.get("factor") for inner in scaling.values() if isinstance(inner, dict))
