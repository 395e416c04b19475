"""Settings of the LoRA adapter, and what vLLM can serve of them."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from skylite.config.section import Section
from skylite.errors import ConfigError

VLLM_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values vLLM accepts for --max-lora-rank (vllm/config/lora.py)."""


def served_rank(rank: int) -> int:
    """The smallest --max-lora-rank vLLM allows that holds `rank`. Raises ConfigError over the largest."""
    if rank > VLLM_LORA_RANKS[-1]:
        raise ConfigError(
            f"LoRA rank {rank} is over {VLLM_LORA_RANKS[-1]}, the largest that vLLM serves.",
            "Train with a smaller rank.",
        )
    return next(r for r in VLLM_LORA_RANKS if r >= rank)


class LoraConfig(Section):
    rank: int = Field(32, ge=1)
    """Rank of the LoRA matrices; vLLM gets the next size it allows."""
    alpha: float = Field(32.0, gt=0)
    """The update is scaled by alpha / rank (alpha / sqrt(rank) with use_rslora)."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """On the adapter's input while training; vLLM samples without it."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """"all-linear", a list of module names, or one regular expression a list entry (full match on the module path)."""
    exclude_modules: list[str] = []
    """Module names or regular expressions left out."""
    lora_sync_path: str | None = None
    """Folder the adapters are published in; default: adapters/ in the run. A /dev/shm folder is the fastest."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) (arXiv 2312.03732)."""
    from_adapter: str | None = None
    """Warm start: folder with adapter_model.safetensors and adapter_config.json that version 0 begins as."""
    init: str = "default"
    """default (Kaiming A, zero B), gaussian or orthogonal: those that leave the base weights unchanged."""
    use_dora: bool = False
    """Refused: vLLM cannot serve DoRA."""
    bias: str = "none"
    """Refused unless "none": vLLM cannot serve trained biases."""
    modules_to_save: list[str] = []
    """Refused unless empty: vLLM cannot serve fully trained modules."""

    # One validator a field and not one for the section: each speaks even when another key of the section is wrong.
    @field_validator("rank")
    @classmethod
    def rank_fits_vllm(cls, rank: int) -> int:
        if rank > VLLM_LORA_RANKS[-1]:
            raise ValueError(
                f"{rank} is over {VLLM_LORA_RANKS[-1]}, the largest rank that vLLM serves; use a smaller one."
            )
        return rank

    @field_validator("use_dora")
    @classmethod
    def no_dora(cls, use_dora: bool) -> bool:
        if use_dora:
            raise ValueError(
                "true cannot be served: vLLM refuses DoRA adapters; leave it false (use_rslora=true works)."
            )
        return use_dora

    @field_validator("bias")
    @classmethod
    def no_bias(cls, bias: str) -> str:
        if bias != "none":
            raise ValueError(
                f'"{bias}" cannot be served: vLLM refuses adapters with biases; leave it "none".'
            )
        return bias

    @field_validator("modules_to_save")
    @classmethod
    def no_modules_to_save(cls, modules: list[str]) -> list[str]:
        if modules:
            raise ValueError(
                f"{modules} cannot be served: only LoRA matrices travel to vLLM; name the modules in target_modules instead."
            )
        return modules

    @field_validator("init")
    @classmethod
    def init_leaves_the_base(cls, init: str) -> str:
        if init not in ("default", "gaussian", "orthogonal"):
            raise ValueError(
                f'"{init}" is refused: PiSSA, OLoRA, CorDA, LoftQ and EVA change or presume changed base weights, which vLLM does not '
                "have; use default, gaussian or orthogonal."
            )
        return init

    @property
    def vllm_rank(self) -> int:
        """The smallest rank vLLM allows that holds ours."""
        return served_rank(self.rank)
