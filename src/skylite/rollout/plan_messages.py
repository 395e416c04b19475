"""What a plan tells the user and config.json, a sentence each."""

from __future__ import annotations

import math
from collections.abc import Sequence

from skylite.config.train import HIGHEST_USUAL_LR, LOWEST_USUAL_LR, TrainConfig
from skylite.data.prompts import PromptFileInfo
from skylite.evaluation.confidence_interval import wilson
from skylite.notes import Note, notes_of, warning
from skylite.types import Prompt

ENOUGH_HELD_OUT = 50
"""With fewer problems, an accuracy has a 95 % interval of more than 13 points on either side."""


def data_note(config: TrainConfig, info: PromptFileInfo, count: int) -> str:
    """The training data in one sentence, for config.json."""
    difficulty = f", difficulty {config.data.difficulty}" if config.data.difficulty else ""
    source = f"{info.dataset} ({info.source_kind}: {info.source}){difficulty}"
    return f"data: {source}, {count} training problems, {rewards_text(config, info)}"


def rewards_text(config: TrainConfig, info: PromptFileInfo) -> str:
    """What scores the completions: the environment, the chosen functions, or the reward of the data."""
    specs = config.source.scorers or [info.reward]
    weights = [f" (weight {weight:g})" for weight in config.source.weights] or [""] * len(specs)
    names = [f"{spec}{weight}" for spec, weight in zip(specs, weights, strict=True)]
    return f"{config.source.scored_by}{'s' if len(names) > 1 else ''} {', '.join(names)}"


def held_out_note(held_out: Sequence[Prompt]) -> Note | None:
    """A warning if the held-out problems are too few to show what training changes."""
    count = len(held_out)
    if not 0 < count < ENOUGH_HELD_OUT or not any(prompt.answer for prompt in held_out):
        return None
    interval = wilson(count // 2, count)
    points = 50 * (interval.high - interval.low)
    return warning(
        f"{count} held-out problem(s) are too few to see what training changes: an accuracy near "
        f"50 % is known to +-{points:.0f} points only (95 % interval); raise eval.limit, or prepare more rows"
    )


def settings_notes(config: TrainConfig) -> list[Note]:
    """Notes on unusual settings, and on the scale of LoRA."""
    notes: list[Note | str] = []
    lora = config.lora
    divisor, text = (math.sqrt(lora.rank), "sqrt(rank)") if lora.use_rslora else (lora.rank, "rank")
    notes.append(
        f"LoRA rank {lora.rank}, alpha {lora.alpha:g}: the update is scaled by {lora.alpha / divisor:.3g} "
        f"(alpha / {text}); to keep it with another rank, change --alpha too"
    )
    if config.optim.lr < LOWEST_USUAL_LR:
        notes.append(
            warning(
                f"optim.lr={config.optim.lr:g} is under {LOWEST_USUAL_LR:g}; LoRA hardly learns at such rates"
            )
        )
    if config.optim.lr > HIGHEST_USUAL_LR:
        notes.append(
            warning(
                f"optim.lr={config.optim.lr:g} is over {HIGHEST_USUAL_LR:g}; policies collapse at such rates"
            )
        )
    if config.log.to:
        samples = f" and {config.log.samples} completions per step" if config.log.samples else ""
        notes.append(f"settings, metrics{samples} are logged to {', '.join(config.log.to)} (log.to)")
    return notes_of(*notes)
