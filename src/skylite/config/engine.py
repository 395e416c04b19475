"""Settings of the engines."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, field_validator

from skylite.config.base_section import Section
from skylite.user_functions import is_program

CpuLora = Literal["merged", "dense"]
VLLM = "vllm"
"""The launcher that ships (engine/vllm/)."""


class EngineConfig(Section):
    """The engines."""

    launcher: str = VLLM
    """What starts the engines: vllm, or FILE.py:Name, a class of yours like Launcher in
    skylite/engine/interface.py."""
    num_engines: int = Field(1, ge=0)
    """Number of engines. algorithm.name=sft and dpo start none, so it is 0 there."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of each server, which divides the model among them (GPU only). Must divide the attention heads."""
    gpus: list[Annotated[int, Field(ge=0)]] = []
    """Visible GPUs of the servers, from 0, tensor_parallel for each in turn (GPU only). Empty: first GPUs
    without a rank, then the others."""
    gpu_memory_utilization: float = Field(0.45, gt=0, lt=1)
    """Share of each GPU's memory that an engine may use (GPU only); the trainer needs the rest."""
    kv_cache_gib: float = Field(2.0, gt=0)
    """Size of the KV cache in GiB (CPU only)."""
    max_loras: int | None = Field(None, ge=1)
    """Adapters that an engine samples from at once; more take turns. none: as many versions as a run needs;
    `skylite service` takes 4."""
    policies: int = Field(1, ge=1)
    """Policies that share the engines and the trainer: memory is planned for so many. `skylite sweep` sets it
    (--together)."""
    max_num_seqs: int = Field(128, ge=1)
    """Maximum sequences that one engine decodes at once. Unless you set it: on a GPU all of a step,
    if these are more, as far as the KV cache holds them, up to 512."""
    start_timeout_s: float = Field(600.0, gt=0)
    """Seconds for an engine to start. Raise it for large models on slow disks."""
    stall_timeout_s: float = Field(60.0, gt=0)
    """Seconds without a new token while requests wait; then skylite kills and restarts the engine."""
    max_restarts: int = Field(2, ge=0)
    """Maximum restarts of each engine after a crash or hang. After that the run stops and can be resumed."""
    cpu_lora: Literal["auto", "merged", "dense"] = "auto"
    """How an engine computes LoRA on a CPU. dense: products beside the base. merged: dense, but weights
    with the adapter merged in for batches of one version; faster, needs float32 and memory for a copy of the
    weights. auto: merged if the copy fits and trainer.deterministic is false, else dense."""

    @field_validator("launcher")
    @classmethod
    def check_launcher(cls, launcher: str) -> str:
        if launcher != VLLM and not is_program(launcher):
            raise ValueError(f'"{launcher}" is not a launcher; use {VLLM}, or FILE.py:Name.')
        return launcher
