"""The screen of a run: a live panel on a terminal, one line per step elsewhere. It only displays values."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.live import Live

from skylite.engine.canary_reading import verdict_of
from skylite.progress_reporting import duration
from skylite.report.read_run import number
from skylite.ui.live_panel import (
    ENDS,
    CompletionView,
    LivePanel,
    ScreenState,
    has_partial_rewards,
    seconds_left,
    version_name,
    was_sampled,
)
from skylite.ui.logs import ON_PANEL, lines_on_screen, shows_info

logger = logging.getLogger(__name__)

EVERY_STEP = ("sampling", "training", "syncing")
"""Phases of every step: a plain terminal shows them with --verbose only."""


class LiveDisplay:
    """Shows something live on a terminal, and lines elsewhere; a context manager."""

    def __init__(self, render: Callable[[], RenderableType], console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._is_live = self.console.is_interactive and shows_info()
        self._stack = ExitStack()
        self._live = Live(get_renderable=render, console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._stack.enter_context(lines_on_screen(self._print, has_panel=self._is_live, show_work=self._work))
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._live.stop()
        self._stack.close()

    def _work(self, text: str) -> None:
        """Show what the command waits for, if there is a place for it."""

    def _print(self, text: str) -> None:
        """Print a line: above the panel on a live terminal."""
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


class Screen(LiveDisplay):
    """The display of one run. `history`: metrics of the steps before a resume."""

    def __init__(
        self, num_steps: int, console: Console | None = None, history: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.state = ScreenState(num_steps, name="GRPO + LoRA", history=tuple(history))
        super().__init__(lambda: LivePanel(self.state), console)

    def phase(self, name: str, detail: str) -> None:
        """Show the current phase, e.g. phase("sampling", "step 3 of 24").

        After the last phase (done, stopped, failed) the panel stays, and later lines appear below it.
        """
        self.state.phase, self.state.detail = name, detail
        if self._is_live and name in ENDS:
            self._live.stop()
        level = logging.DEBUG if name in EVERY_STEP else logging.INFO
        logger.log(level, f"{name} {detail}".strip(), extra=ON_PANEL)

    def step(self, metrics: Mapping[str, Any], sample: CompletionView | None) -> None:
        """Show a finished step and one of its completions."""
        self.state.history = (*self.state.history, metrics)
        self.state.sample = sample
        logger.info(step_line(self.state.history, self.state.num_steps), extra=ON_PANEL)

    def evaluation(self, label: str, text: str) -> None:
        """Show a held-out result: evaluation("before", "greedy accuracy 31.4 % ...")."""
        self.state.evaluations[label] = text
        logger.info(f"evaluation ({label}): {text}", extra=ON_PANEL)

    def _work(self, text: str) -> None:
        self.state.work = text


def step_line(history: Sequence[Mapping[str, Any]], num_steps: int) -> str:
    """The last step of `history` in one line, for logs, with the time left when it ended."""
    m, left = history[-1], seconds_left(history, num_steps)
    ending = [] if left is None else [f"about {duration(left)} left"]
    if not was_sampled([m]):
        loss, train_s = number(m, "loss/policy"), number(m, "time/train_s")
        parts = (f"step {m['step']}/{num_steps}", f"loss {loss:.4f}", f"train {train_s:.1f} s")
        return "  ".join((*parts, version_name(m), *ending))
    tokens = number(m, "perf/completion_tokens_per_s")
    sample = f"sample {number(m, 'time/rollout_s'):.1f} s ({tokens:.0f} tok/s)"
    right = f"right {100 * number(m, 'reward/right_frac'):.1f} %"
    return "  ".join(
        (
            f"step {m['step']}/{num_steps}",
            f"reward {number(m, 'reward/mean'):.3f}",
            *([] if has_partial_rewards(history) else [right]),
            f"entropy {number(m, 'policy/entropy'):.3f}",
            f"tokens {number(m, 'completion/tokens_mean'):.1f}",
            sample if math.isfinite(tokens) else "sampled before",
            f"train {number(m, 'time/train_s'):.1f} s",
            f"sync {number(m, 'time/sync_s'):.2f} s",
            f"canary {number(m, 'canary/gap_max'):.1e} ({verdict_of(m.get('canary/verified'))})",
            f"mismatch {number(m, 'mismatch/logprob_diff_mean'):.1e}",
            version_name(m),
            *ending,
        )
    )
