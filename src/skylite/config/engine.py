"""Settings of the engines."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from skylite.config.base_section import Section
from skylite.config.judge import is_server
from skylite.user_functions import is_program

CpuLora = Literal["merged", "dense"]
Lent = Literal["kv_cache", "weights"]
"""What an engine lends to the trainer. weights: the KV cache, too."""
VLLM = "vllm"
"""The launcher that ships (engine/vllm/)."""


class EngineConfig(Section):
    """The engines."""

    launcher: str = VLLM
    """What starts the engines: vllm, or FILE.py:Name, a class of yours like Launcher in
    skylite/engine/interface.py."""
    num_engines: int = Field(1, ge=0)
    """Number of engines that skylite starts. algorithm.name=sft and dpo start none, nor does a run with
    engine.urls, so it is 0 there."""
    urls: list[str] = []
    """Engines that you start yourself, such as http://127.0.0.1:8001: vLLM with LoRA and runtime updating,
    which sees the run's adapters at the same path or has push_urls (docs/how-to/engines.md). Empty: skylite
    starts num_engines."""
    key_env: str = ""
    """Environment variable with the token (API key) of the engines in urls. Empty: they ask for none."""
    push_urls: list[str] = []
    """Where no folder is shared: the `skylite receive` beside each engine of urls, in the same order. It gets
    each adapter before the engine loads it. Empty: the engines see the run's folder."""
    push_key_env: str = ""
    """Environment variable with the token (API key) of the receivers in push_urls."""
    ca_file: str = ""
    """File with certificates (PEM) that sign those of urls and push_urls. Empty: the usual authorities."""
    min_engines: int = Field(1, ge=1)
    """Of the engines in urls, one that stops answering is left out until it is back. With fewer than this
    many left the run ends, and can be resumed."""
    tensor_parallel: int = Field(1, ge=1)
    """GPUs of each server, which divides the model among them (GPU only). Must divide the attention heads."""
    gpus: list[Annotated[int, Field(ge=0)]] = []
    """Visible GPUs of the servers, from 0, tensor_parallel for each in turn (GPU only). Empty: first GPUs
    without a rank, then the others."""
    gpu_memory_utilization: float = Field(0.45, gt=0, lt=1)
    """Share of each GPU's memory that an engine may use (GPU only); the trainer needs the rest."""
    sleep: Literal["auto", "never", Lent] = "auto"
    """What engines lend to a trainer on the same GPU while it computes (GPU only). kv_cache: the memory of
    their KV cache. weights: also that of the model, and the trainer's base leaves the GPU while they sample;
    the machine's memory holds both then. Needs rollout.max_staleness=0. auto: the least with which a run fits
    and samples enough sequences at once; never with placement=explicit."""
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
    """Seconds without a new token while requests wait; then skylite kills and restarts the engine. Time in
    which the engine waits for a core, on a machine that others use, does not count."""
    max_restarts: int = Field(2, ge=0)
    """Maximum restarts of each engine after a crash or hang. After that the run stops and can be resumed."""
    cpu_lora: Literal["auto", "merged", "dense"] = "auto"
    """How an engine computes LoRA on a CPU. dense: products beside the base. merged: dense, but weights
    with the adapter merged in for batches of one version; faster, needs float32 and memory for a copy of the
    weights. auto: merged if the copy fits and trainer.deterministic is false, else dense."""

    @model_validator(mode="before")
    @classmethod
    def start_none_beside_urls(cls, values: Any) -> Any:
        return values | {"num_engines": 0} if isinstance(values, dict) and values.get("urls") else values

    @model_validator(mode="after")
    def check_urls(self) -> Self:
        for name, urls, key in (
            ("engine.urls", self.urls, "engine.key_env"),
            ("engine.push_urls", self.push_urls, "engine.push_key_env"),
        ):
            for url in urls:
                if not is_server(url):
                    raise ValueError(
                        f"{name} names {url}, which is not the address of a server; write it like "
                        f"http://127.0.0.1:8001 (a key belongs into the variable of {key})."
                    )
            if twice := [url for url in urls if urls.count(url) > 1]:
                raise ValueError(f"{name} names {twice[0]} twice; name each server once.")
        if self.urls and len(self.push_urls) not in (0, len(self.urls)):
            raise ValueError(
                f"engine.push_urls names {len(self.push_urls)} receivers for the {len(self.urls)} engines of "
                "engine.urls; name one for each, in the same order, or none."
            )
        if self.push_key_env and not self.push_urls:
            raise ValueError(
                f"engine.push_key_env={self.push_key_env} is for engine.push_urls, which is empty; leave it "
                "out."
            )
        if self.urls and self.min_engines > len(self.urls):
            raise ValueError(
                f"engine.min_engines={self.min_engines} is more than the {len(self.urls)} of engine.urls."
            )
        for name in ("key_env", "push_urls", "ca_file"):
            if not self.urls and getattr(self, name):
                raise ValueError(
                    f"engine.{name}={getattr(self, name)} is for the engines of engine.urls, which is empty; "
                    "leave it out."
                )
        return self

    @property
    def lends(self) -> Lent | None:
        """What the engines lend to the trainer while it computes."""
        return self.sleep if self.sleep in ("kv_cache", "weights") else None

    @property
    def count(self) -> int:
        """How many engines sample: those that skylite starts, or those of `urls`."""
        return self.num_engines or len(self.urls)

    @field_validator("launcher")
    @classmethod
    def check_launcher(cls, launcher: str) -> str:
        if launcher != VLLM and not is_program(launcher):
            raise ValueError(f'"{launcher}" is not a launcher; use {VLLM}, or FILE.py:Name.')
        return launcher
