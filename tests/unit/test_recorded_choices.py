"""What the trainer chose for the model, and why, is on the screen and in config.json."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from skylite.config.loading import read_run_config
from skylite.model import fast_path_check
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.packing import pack_tokens
from skylite.model.policy import load_policy
from skylite.model.process_group import Dist
from skylite.notes import Note
from skylite.rollout.loop import wait_for_trainer_step
from skylite.rollout.run_session import record_choices
from skylite.trainer.loop import write_step_file
from skylite.ui.dashboard import Screen
from skylite.ui.logs import configure_logging
from tests.cases import PROBE
from tests.decisions import resolved
from tests.small_run import settings
from tests.unit.simulated_run import plan_of
from tests.wrong_structures import WRONG

REFUSED = "no tree for this model"


@contextmanager
def no_trees() -> Iterator[None]:
    """A model whose pass over a prefix tree raises an error of two lines."""

    def refuse(*args: Any) -> Any:
        if args[1] == "tree":
            raise ValueError(f"{REFUSED}\nand its stack")
        return pack_tokens(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path_check, "pack_tokens", refuse)
        yield


@pytest.mark.parametrize(
    ("model", "packing", "reason", "last"),
    [
        (nullcontext, "tree", "mean logprob difference to the plain form ", "packing"),
        (WRONG["wrong scale"], "padded", "mean logprob difference to the plain form ", "padded rows"),
        (no_trees, "padded", f"the model does not support it: {REFUSED}; tree attention: ", "padded rows"),
    ],
    ids=["all shortcuts", "a wrong result", "an error"],
)
def test_the_choices_and_the_reason_of_a_fallback_are_shown_and_recorded(
    tmp_path: Path,
    tiny_llama: Path,
    dist: Dist,
    model: Callable[[], AbstractContextManager[None]],
    packing: str,
    reason: str,
    last: str,
) -> None:
    """They replace the choices of an earlier start, and leave everything else in config.json as it is."""
    plan = plan_of(tmp_path, 0, 3, 0, 1, False)
    earlier = plan.resolved.model_copy(update={"choices": ["packing: another"], "notes": [Note("a note")]})
    plan = replace(plan, resolved=earlier)
    with model():
        _, choices = enable_shortcuts(load_policy(resolved(tiny_llama, tmp_path), settings(), dist), PROBE)
    write_step_file(plan.run, dist, 0, {"choices": choices}, {}, (0.0, 1.0))

    configure_logging()
    out = io.StringIO()
    with Screen(3, Console(file=out, width=80)):
        record_choices(plan, asyncio.run(wait_for_trainer_step(plan, 0)))
    shown = out.getvalue().splitlines()
    assert len([line for line in shown if line.startswith("trainer: ")]) == 1, "one line for all"
    assert all(choice.partition(";")[0] in " ".join(shown) for choice in choices)
    (chosen,) = [choice for choice in choices if choice.startswith("packing: ")]
    assert chosen.startswith(f"packing: {packing}; {reason}")
    assert last in choices[-1]
    for part in ("LM head in chunks: True; ", "norms: fused as "):
        assert sum(choice.startswith(part) for choice in choices) == 1

    recorded = read_run_config(plan.run.config_path)
    assert recorded.resolved.choices == choices
    assert recorded == plan.run_config.model_copy(
        update={"resolved": earlier.model_copy(update={"choices": choices})}
    )
