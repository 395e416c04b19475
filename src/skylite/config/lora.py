"""Settings of the LoRA adapter, limited to what engines serve."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat, PositiveInt, ValidationInfo, field_validator

from skylite.config.base_section import UPDATE, WHAT, Flag, Section
from skylite.config.check_regex import check_regex

INITS = ("default", "xavier", "normal", "gaussian", "orthogonal")
WILDCARD = "*"
"""A pattern that begins with it has wildcards: no regex begins so."""


def check_modules(modules: str | list[str] | None) -> None:
    """Raise ValueError for a regex that cannot be used."""
    for pattern in modules if isinstance(modules, list) else []:
        if not pattern.startswith(WILDCARD):
            check_regex(pattern)


class LoraConfig(Section):
    """The LoRA adapter under training."""

    rank: Annotated[int, Flag("--rank", UPDATE)] = Field(32, ge=1)
    """LoRA rank, at most 512; engines reserve the next rank that they allow. A higher rank has more capacity
    and needs more memory."""
    alpha: Annotated[float, Flag("--alpha", UPDATE)] = Field(32.0, gt=0)
    """Scales the LoRA update by alpha / rank, or by alpha / sqrt(rank) with use_rslora."""
    dropout: float = Field(0.0, ge=0, lt=1)
    """Dropout probability in the adapter during training. The engine samples without dropout."""
    dropout_position: Literal["before", "after"] = "before"
    """Where dropout is: on the input of A (PEFT; Megatron's pre), or on its output (Megatron's post)."""
    target_modules: Literal["all-linear"] | list[str] = "all-linear"
    """Modules that get LoRA: "all-linear" (all but the LM head), or a list of module names, regular
    expressions and wildcards ("*.layers.0.*"). The last two must match the complete module path; wildcards
    begin with *. Megatron's names, such as linear_qkv, stand for the model's own."""
    exclude_modules: list[str] = []
    """Modules that get no LoRA, named as in target_modules."""
    target_parameters: list[str] = []
    """Expert weights that get LoRA beside the modules: ["experts.gate_up_proj", "experts.down_proj"], or the
    ends of longer paths, as in PEFT. A layer's two go together. Routers stay frozen."""
    freeze_vision: bool = True
    """false: the tower that reads images has LoRA, too, where target_modules matches its linear layers. For
    Qwen2.5-VL and Qwen3-VL, on prompts with images."""
    freeze_projection: bool = True
    """false: the same of the linear layers between the tower and the text model."""
    rank_pattern: dict[str, PositiveInt] = {}
    """Other ranks of single modules, such as { q_proj = 8 }: names, or regular expressions for the end of the
    module path. The first that matches counts."""
    alpha_pattern: dict[str, PositiveFloat] = {}
    """Other alphas of single modules, named as in rank_pattern."""
    lora_sync_path: str | None = None
    """Folder to publish adapters in. none: adapters/ in the run. A folder in /dev/shm is the fastest. skylite
    creates it with mode 0700, and refuses one that other users own, may write to or lead to by a link."""
    use_rslora: bool = False
    """Scale by alpha / sqrt(rank) instead of alpha / rank (arXiv 2312.03732). Use it with high ranks."""
    from_adapter: Annotated[
        str | None, Flag("--from-adapter", WHAT, default="a new adapter", is_path=True)
    ] = None
    """Warm start: folder with adapter_model.safetensors and adapter_config.json, which become version 0.
    none: start from the base model."""
    init: str = "default"
    """Initialisation of the adapter: default (Kaiming A, zero B), xavier or normal (as Megatron: A by Xavier,
    or with deviation 0.2; zero B), gaussian (A with deviation 1 / rank) or orthogonal. All leave the base
    weights unchanged."""
    use_dora: bool = False
    """Must stay false: engines do not serve DoRA."""
    bias: str = "none"
    """Must stay "none": engines do not serve trained biases."""
    modules_to_save: list[str] = []
    """Must stay empty: engines do not serve fully trained modules."""

    @property
    def unfrozen(self) -> list[str]:
        """The settings that give LoRA to modules which read images."""
        return [name for name in ("freeze_vision", "freeze_projection") if not getattr(self, name)]

    @property
    def max_rank(self) -> int:
        """The highest rank of a module, which engines reserve."""
        return max([self.rank, *self.rank_pattern.values()])

    @field_validator("target_parameters")
    @classmethod
    def check_target_parameters(cls, names: list[str], info: ValidationInfo) -> list[str]:
        if names and info.data.get("dropout"):
            raise ValueError(
                f"{names} cannot have lora.dropout={info.data['dropout']:g}: PEFT has no dropout for "
                "expert weights; set it to 0."
            )
        return names

    # One validator per field, because a validator of the section does not run if any of its fields is wrong.
    @field_validator("target_modules", "exclude_modules")
    @classmethod
    def check_modules(cls, modules: str | list[str]) -> str | list[str]:
        check_modules(modules)
        return modules

    @field_validator("rank_pattern", "alpha_pattern")
    @classmethod
    def check_patterns(cls, pattern: dict[str, float]) -> dict[str, float]:
        for key in pattern:
            check_regex(key)
        return pattern

    @field_validator("use_dora")
    @classmethod
    def check_dora(cls, use_dora: bool) -> bool:
        if use_dora:
            raise ValueError(
                "true cannot be served: engines refuse DoRA adapters; leave it false (use_rslora=true works)."
            )
        return use_dora

    @field_validator("bias")
    @classmethod
    def check_bias(cls, bias: str) -> str:
        if bias != "none":
            raise ValueError(
                f'"{bias}" cannot be served: engines refuse adapters with biases; leave it "none".'
            )
        return bias

    @field_validator("modules_to_save")
    @classmethod
    def check_modules_to_save(cls, modules: list[str]) -> list[str]:
        if modules:
            raise ValueError(
                f"{modules} cannot be served: engines load LoRA matrices only; "
                "list the modules in target_modules instead."
            )
        return modules

    @field_validator("init")
    @classmethod
    def check_init(cls, init: str, info: ValidationInfo) -> str:
        if init not in INITS:
            raise ValueError(
                f'"{init}" is refused: PiSSA, OLoRA, CorDA, LoftQ and EVA change or expect changed base '
                f"weights, which the engine does not have; use {', '.join(INITS)}."
            )
        ranks = [info.data.get("rank", 2), *info.data.get("rank_pattern", {}).values()]
        if init == "orthogonal" and (odd := [rank for rank in ranks if rank % 2]):
            raise ValueError(f'"orthogonal" needs even ranks, and one is {odd[0]}; use default.')
        if init == "orthogonal" and info.data.get("target_parameters"):
            raise ValueError('"orthogonal" is not there for target_parameters; use default.')
        return init
