"""What skylite prints about predicted memory, and the settings that make a prediction fit."""

from __future__ import annotations

from collections.abc import Sequence

from skylite.config.train import TrainConfig
from skylite.engine.vllm.server_command import CPU_BLOCK_SIZE
from skylite.notes import Note, warning
from skylite.resources.attention_memory import full_copies, limits_of, worst_copies
from skylite.resources.predicted_memory import EngineMemory, TrainerMemory

GIB = 2**30
HALVED = "run out of memory, and skylite will then halve the micro-batches"


def cpu_note(config: TrainConfig, trainer: TrainerMemory, engine: EngineMemory, free: int) -> Note:
    """The prediction for a CPU run, and a warning if the machine has less."""
    tokens = micro_batch_tokens(config)
    kv_cache = int(config.engine.kv_cache_gib * GIB)
    ranks, engines = config.trainer.num_ranks, config.engine.num_engines
    total = ranks * trainer.total(tokens) + engines * (engine.before_kv() + kv_cache)
    parts = (
        f"{engines} engine(s) of {gib(engine.before_kv() + kv_cache)} ({engine_parts(engine)}, KV cache "
        f"{gib(kv_cache)}), {ranks} rank(s) of {gib(trainer.total(tokens))} at {tokens} tokens "
        f"({trainer_parts(trainer, tokens)})"
    )
    if total <= free:
        return Note(f"memory: about {gib(total)} of {gib(free)} free; {parts}")
    return warning(
        f"memory: the run needs about {gib(total)}, more than the {gib(free)} that are free "
        f"({parts}), so it will probably run out of memory; {cpu_remedy(config, trainer, engine, free)}"
    )


def cpu_remedy(config: TrainConfig, trainer: TrainerMemory, engine: EngineMemory, free: int) -> str:
    """The first setting that alone makes a CPU run fit; without one, all that help."""
    ranks, engines = config.trainer.num_ranks, config.engine.num_engines
    kv_cache, longest = int(config.engine.kv_cache_gib * GIB), config.max_sequence_tokens
    smallest = engine.kv_cache(longest, CPU_BLOCK_SIZE)
    fitting = most_tokens(config, trainer, (free - engines * (engine.before_kv() + kv_cache)) // ranks)
    if fitting:
        return f"set trainer.tokens_per_micro_batch={fitting}"
    left = free - ranks * trainer.total(micro_batch_tokens(config)) - engines * engine.before_kv()
    tenths = 10 * left // (engines * GIB)
    if engine.kv_per_token and tenths > 0 and tenths * GIB // 10 >= smallest:
        return f"set engine.kv_cache_gib={tenths / 10:g}"
    helps = {
        "trainer.checkpointing=full": config.trainer.checkpointing != "full",
        f"trainer.tokens_per_micro_batch={longest}": micro_batch_tokens(config) > longest,
        "a smaller engine.kv_cache_gib": True,
        shorter(config): True,
        "fewer ranks (trainer.num_ranks)": ranks > 1,
        "fewer engines (engine.num_engines)": engines > 1,
        "a smaller model": True,
    }
    return f"use {some_of(helps)}"


def engine_note(config: TrainConfig, engine: EngineMemory, kv_cache: int) -> Note:
    """The prediction for an engine on GPUs."""
    tokens, size = kv_cache // max(1, engine.kv_per_token), config.engine.tensor_parallel
    where = f" on each of its {size} GPUs" if size > 1 else ""
    return Note(
        f"memory of an engine{where}: {gib(engine.before_kv() + kv_cache)} ({engine_parts(engine)}, "
        f"KV cache {gib(kv_cache)} for {tokens} tokens)"
    )


def rank_note(config: TrainConfig, trainer: TrainerMemory, limit: int, engines: int) -> Note:
    """The prediction for a rank on a GPU with this many engines, and a warning if it exceeds `limit`."""
    tokens = micro_batch_tokens(config)
    limits = limits_of(config)
    copies = full_copies(tokens, limits)
    needed, worst = trainer.total(tokens, copies), trainer.total(tokens, worst_copies(tokens, limits))
    parts = trainer_parts(trainer, tokens, copies)
    short = "if many completions are short"
    risk = f"memory of a rank: a micro-batch of {tokens} tokens needs about {gib(needed)}"
    remedy = rank_remedy(config, trainer, limit, engines)
    if needed > limit:
        end = HALVED if tokens > config.max_sequence_tokens else "run out of memory"
        return warning(
            f"{risk}, more than the {gib(limit)} that it has ({parts}), so a step will probably {end}; "
            f"{remedy}"
        )
    if worst > limit:
        return warning(
            f"{risk} of {gib(limit)} ({parts}), but {gib(worst)} {short}, so a step may {HALVED}; {remedy}"
        )
    return Note(
        f"memory of a rank: about {gib(needed)} of {gib(limit)} at {tokens} tokens per micro-batch ({parts})"
        + (f", up to {gib(worst)} {short}" if worst > needed else "")
    )


def rank_remedy(config: TrainConfig, trainer: TrainerMemory, limit: int, engines: int) -> str:
    """The micro-batch that fits at all lengths; without one, all settings that help."""
    setting, longest = "trainer.tokens_per_micro_batch", config.max_sequence_tokens
    if fitting := most_tokens(config, trainer, limit):
        return f"set {setting}={fitting}, which fits at all lengths of completions, or auto, which measures"
    smaller = f"{setting}={longest}, " if micro_batch_tokens(config) > longest else ""
    return f"use {smaller}{rank_settings(config, engines)}"


def rank_settings(config: TrainConfig, engines: int) -> str:
    """The settings with which a rank needs less or has more memory, beside this many engines on its GPU."""
    return some_of(
        {
            "trainer.checkpointing=full": config.trainer.checkpointing != "full",
            "a lower engine.gpu_memory_utilization": engines > 0,
            shorter(config): True,
            "a GPU of its own for the engine": engines > 0,
            "more ranks, each on its own GPU (trainer.num_ranks)": True,
            "trainer.offload=true": not config.trainer.offload,
        }
    )


def shorter(config: TrainConfig) -> str:
    """The setting that makes trajectories shorter."""
    return "a smaller env.max_tokens" if config.env.episode else "a shorter rollout.max_completion_tokens"


def most_tokens(config: TrainConfig, trainer: TrainerMemory, limit: int) -> int:
    """Tokens of the largest micro-batch that fits into `limit` bytes at all lengths of completions.

    Two digits, downwards: a prediction is no better. 0 if the longest trajectory does not fit.
    """
    longest, limits = config.max_sequence_tokens, limits_of(config)

    def fits(count: int) -> bool:
        return trainer.total(count, worst_copies(count, limits)) <= limit

    if not fits(longest):
        return 0
    step = tokens = longest
    while fits(tokens + step):
        tokens, step = tokens + step, 2 * step
    while step := step // 2:
        tokens += step if fits(tokens + step) else 0
    digits: int = 10 ** max(0, len(str(tokens)) - 2)
    return max(longest, tokens // digits * digits)


def micro_batch_tokens(config: TrainConfig) -> int:
    """The tokens of a micro-batch; for "auto", which is measured later, those of the longest trajectory."""
    tokens = config.trainer.tokens_per_micro_batch
    longest = config.max_sequence_tokens
    return longest if tokens == "auto" else max(tokens, longest)


def engine_parts(engine: EngineMemory) -> str:
    return parts_text(
        [
            ("weights", engine.weights),
            ("LoRA slots", engine.lora_slots),
            ("activations", engine.activations),
            ("process", engine.process),
        ]
    )


def trainer_parts(trainer: TrainerMemory, tokens: int, copies: int = 0) -> str:
    activations = trainer.total(tokens, copies) - trainer.state()
    return parts_text(
        [
            ("weights", trainer.weights),
            ("adapter and optimizer", trainer.adapter),
            ("activations and head", activations),
            ("process", trainer.process),
        ]
    )


def parts_text(parts: Sequence[tuple[str, int]]) -> str:
    return ", ".join(f"{name} {gib(count)}" for name, count in parts)


def some_of(helps: dict[str, bool]) -> str:
    """Those that help, joined by "or"."""
    *most, last = [text for text, yes in helps.items() if yes]
    return f"{', '.join(most)} or {last}" if most else last


def gib(count: float) -> str:
    return f"{count / GIB:.1f} GiB"
