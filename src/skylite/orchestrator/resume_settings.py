"""Which settings of a run may change when it goes on: those that leave its result as it would have been."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skylite.config import TrainConfig
from skylite.errors import ConfigError

HARMLESS = (
    "checkpoint", "eval", "guards", "sync", "stop", "num_steps",
    "reward.num_workers", "reward.timeout_s", "trainer.step_timeout_s", "trainer.max_restarts",
    "engine.start_timeout_s", "engine.stall_timeout_s", "engine.max_restarts",
    "data.path", "model.use_shm", "trainer.offload",
)  # fmt: skip
"""Sections and fields that no number of a step depends on. data.path: the file itself is compared by its hash.
The last two: where the model and the moments lie."""
ROUNDING = (
    "trainer.num_ranks",
    "trainer.num_threads",
    "trainer.tokens_per_micro_batch",
    "trainer.checkpointing",
    "trainer.attention",
    "trainer.deterministic",
    "engine.num_engines",
    "engine.max_num_seqs",
    "engine.kv_cache_gib",
    "engine.gpu_memory_utilization",
)
"""How the same step is cut and computed: the result is the same up to rounding."""


def check_changes(old: TrainConfig, new: TrainConfig, say: Callable[[str], None]) -> None:
    """Raise ConfigError that names every change (both values) that would give another result; say those that change rounding."""
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    changed = [key for key in after if before.get(key) != after[key]]
    refused = [key for key in changed if not _is_under(key, (*HARMLESS, *ROUNDING))]
    if old.optim.schedule != "constant" and "num_steps" in changed:
        refused.append("num_steps")
    if refused:
        said = "; ".join(f"{key} is {_text(before.get(key))} and was given as {_text(after[key])}" for key in refused)
        why = f" (optim.schedule={old.optim.schedule} ends at num_steps)" if "num_steps" in refused else ""
        raise ConfigError(
            f"--resume goes on with a run as it was, and this would change its result: {said}{why}.",
            "Leave it away, or begin a new run with --from-adapter.",
        )
    for key in changed:
        if _is_under(key, ROUNDING):
            say(f"{key} is {_text(after[key])} from here on, before {_text(before.get(key))}: the result is the same up to rounding")


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested sections to dotted fields."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return found


def _is_under(key: str, names: tuple[str, ...]) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in names)


def _text(value: Any) -> str:
    """As one would type it."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
