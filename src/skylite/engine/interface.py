"""What skylite needs of an engine, and of a launcher that knows how to start one.

engine/vllm/ is the implementation that ships. The tests bring a second one (tests/fakes/launcher.py), and
`engine.launcher=FILE.py:Name` brings a user's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

from skylite.config.engine import CpuLora, Lent
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTemplate, ChatTokenizer
from skylite.engine.connections import Address
from skylite.notes import Note
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt

BASE_NAME = "base"
"""Served name of the model without an adapter."""


def served_versions(config: TrainConfig) -> int:
    """How many adapters an engine samples from at once: engine.max_loras. Of a run one, and one for each
    version of rollout.max_staleness.

    On-policy no request for k is left when k + 1 is loaded. An engine holds one adapter more than it samples
    from at once, so a restarted one can load both. Of several policies each may be about to load one.
    """
    own = config.engine.policies * (2 + config.rollout.max_staleness) - 1
    return config.engine.max_loras or own


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """Sampling parameters. Each is sent, because a server fills in those that are not."""

    temperature: float
    """0 is greedy."""
    top_p: float
    """Sample from the most likely tokens with this total probability; 1: all."""
    top_k: int
    """Sample from this many most likely tokens; 0: all."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """The model's end-of-turn tokens."""
    stop: tuple[str, ...] = ()
    """Texts that end a completion and stay in its text."""
    ignore_eos: bool = False
    """Sample on after the model's end of a text, to `max_tokens`."""
    seed: int
    """Call i of a request uses seed + i."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSpec:
    """The settings of one engine."""

    name: str
    """Its name in logs and errors."""
    model_path: Path
    """Local folder."""
    device: Literal["cpu", "cuda"]
    dtype: Literal["bfloat16", "float32"]
    address: Address
    """Where it serves. A socket's folder needs mode 0700; behind a token every route asks for it."""
    receiver: Address | None = None
    """Where adapters are sent before it loads them. None: it sees their folder."""
    lora_rank: int | None
    """Largest rank of its adapters. None: the base alone, without LoRA."""
    target_modules: list[str] | None
    """Modules that the adapters change, by name or path. None: all layers and embeddings, which is slower."""
    max_loras: int
    """Largest number of adapters in one batch. One more stays loaded."""
    fixed_adapter: AdapterVersion | None = None
    """The only adapter of a public server. None: adapters are loaded while it runs."""
    template: ChatTemplate | None = None
    """How chats are rendered. None: as the model says."""
    max_model_len: int
    """Prompt and completion tokens together. -1: what the model was made for and the GPU holds (GPU only)."""
    max_num_seqs: int
    kv_cache_gib: float
    """CPU only."""
    gpu_memory_utilization: float
    """GPU only. An engine starts only if this share of the GPU is free, even with kv_cache_bytes."""
    kv_cache_bytes: int | None = None
    """GPU only, on each GPU. None: what the engine finds free within gpu_memory_utilization at its start."""
    lends: Lent | None = None
    """What it gives back while it sleeps. None: it never sleeps."""
    cpu_cores: int | None = None
    """CPU only: how many it computes on. None: all."""
    cpu_lora: CpuLora
    """CPU only: how LoRA is computed, see EngineConfig.cpu_lora."""
    seed: int
    gpus: tuple[int, ...] = ()
    """GPUs by nvidia-smi's numbers; empty: all that the environment makes visible."""
    tensor_parallel: int = 1
    """GPU only: how many of them share the model."""
    shared_network: bool = False
    """TrainConfig.shared_network."""
    max_images: int = 0
    """Most images of a prompt. 0: prompts are text."""
    max_logprobs: int | None = None
    """Most tokens in one place whose logprobs are asked for. None: as the engine has it."""
    tower_lora: bool = False
    """Whether its adapters also change modules that read images."""
    base_name: str = BASE_NAME
    """What the server calls the model without an adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFacts:
    """What was found out about a running server that skylite did not start."""

    base_name: str
    """See `EngineSpec`."""
    notes: Sequence[Note]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """Predicted bytes of one engine, on each of its GPUs."""

    weights: int
    lora_slots: int
    """A and B of every adapted matrix, for each adapter that is served at once."""
    activations: int
    process: int
    kv_per_token: int
    """0: unknown."""
    block_size: int
    """Tokens of the largest block of the KV cache."""

    def before_kv(self) -> int:
        """Everything but the KV cache."""
        return self.weights + self.lora_slots + self.activations + self.process

    def asleep(self, lends: Lent) -> int:
        """What an engine that lends so much keeps."""
        return self.before_kv() if lends == "kv_cache" else self.activations + self.process

    def kv_cache(self, tokens: int, sequences: int = 1) -> int:
        """For sequences of so many tokens: each has full blocks, and an engine holds one for itself."""
        return (sequences * -(-tokens // self.block_size) + 1) * self.block_size * self.kv_per_token

    def sequences(self, kv_cache: float, tokens: int) -> int:
        """How many sequences of `tokens` tokens a KV cache of `kv_cache` bytes holds."""
        return (int(kv_cache) // (self.block_size * self.kv_per_token) - 1) // -(-tokens // self.block_size)

    def longest(self, kv_cache: float) -> int:
        """Tokens of the longest sequence that a KV cache of so many bytes holds."""
        return (int(kv_cache) // (self.block_size * self.kv_per_token) - 1) * self.block_size


class Engine(Protocol):
    """A running engine: base and adapters of one model.

    A call is one attempt. It raises EngineFailed if another may succeed, SyncFailed if the engine serves or
    loads another adapter than it was asked for, and RunFailed if it refuses the request.
    engine/retrying_engine.py is the same with retries and across restarts.
    """

    @property
    def name(self) -> str:
        """Its name in logs and errors."""

    async def is_ready(self) -> bool:
        """Whether it serves."""

    async def progress(self) -> float:
        """A number that grows with every token of any request. Raises EngineDead if it reports its end."""

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> Sequence[Call | None]:
        """[n] completions of one prompt; None for one that the engine dropped.

        Args:
            model: BASE_NAME or the name of an adapter version.
            version: recorded in each completion.
        """

    async def score(self, model: str, prompt: EncodedPrompt) -> list[float]:
        """[L - 1] logprobs in nats of all tokens of the sequence but the first."""

    async def top_tokens(
        self, model: str, token_ids: Sequence[int], count: int
    ) -> list[list[tuple[int, float]]]:
        """[L - 1] the `count` most likely tokens with their logprobs, at the place of all tokens but the
        first. The best comes first. RunFailed if the engine gives none, or fewer."""

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Load a version under its own name, which no other version ever has."""

    async def unload_adapter(self, name: str) -> None:
        """Unload a version that no request uses. No error if it is not loaded."""

    async def sleep(self) -> None:
        """Give `EngineSpec.lends` back. Requests in flight are nobody's any more: it drops them."""

    async def wake(self) -> None:
        """Take the memory again. No error if it does not sleep. The base and the adapters are as before."""

    async def aclose(self) -> None:
        """Close the connections."""


class Launcher(Protocol):
    """How engines of one kind start, and what they can serve."""

    @property
    def name(self) -> str:
        """The engine's name, as users know it."""

    def check_machine(self, device: str) -> None:
        """Raise SkyliteError if the installed engine does not run on this device."""

    def check_sleep(self, device: str, lends: Lent) -> None:
        """Raise ConfigError if the installed engine cannot lend this on this device."""

    def check_model(
        self,
        model_path: Path,
        device: str,
        rank: int | None,
        lora: LoraConfig | None = None,
        max_images: int = 0,
    ) -> str:
        """Raise SkyliteError if adapters of this rank and, with `lora`, these modules cannot be served.

        Without a rank, if the model cannot be served without adapters. With `max_images`, also if prompts
        with images cannot. Returns a note for the user, or "".
        """

    def bf16_reason(self, model_path: Path, device: str) -> str:
        """Why this model is computed in bfloat16 only; "" where float32 works, too."""

    def choose_cpu_lora(self, config: TrainConfig, dtype: str, model_path: Path) -> CpuLora:
        """How LoRA is computed on a CPU: the setting, or the choice behind `auto`."""

    def notes(self, config: TrainConfig, device: str, dtype: str, cpu_lora: CpuLora) -> list[str]:
        """What the user should know about a run with these settings."""

    def memory(
        self, config: TrainConfig, model_path: Path, device: str, dtype: str, cpu_lora: CpuLora
    ) -> EngineMemory:
        """What an engine of this run will take. Raises ModelError for a damaged model folder."""

    def command(self, spec: EngineSpec) -> list[str]:
        """The command line of a server at `spec.address`.

        Besides what `connect` asks for, it answers OpenAI's /v1/models and /v1/chat/completions. That of a
        teacher answers /v1/completions with vLLM's `prompt_logprobs`.
        """

    def environment(self, spec: EngineSpec) -> dict[str, str]:
        """Environment variables of that server, added to the parent's."""

    def startup_state(self, log: str) -> str:
        """What a starting server does, in words, from the end of its log; empty if that does not tell."""

    def connect(self, spec: EngineSpec) -> Engine:
        """A client of the server, which may not serve yet."""

    async def check_server(
        self, spec: EngineSpec, lora: LoraConfig, probe: AdapterVersion, tokenizer: ChatTokenizer | None
    ) -> ServerFacts:
        """Ask the server at `spec.address`, which skylite did not start, whether it can serve the run.

        Args:
            probe: an adapter like those of the run, in their folder. The server holds it until the end.
            tokenizer: the run's, if the server's is to be compared.

        Raises SkyliteError with what is missing.
        """
