"""The screen of a run: one live page on a terminal, one clean line a step elsewhere. Shows plain values; knows nothing of the run."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live

from skylite.ui.logs import ON_PAGE, lines_on_screen, shows_info
from skylite.ui.page import ENDS, CompletionView, Page, ScreenState

logger = logging.getLogger(__name__)

EVERY_STEP = ("sampling", "training", "syncing")
"""Phases that come in every step: shown live, too many for a log."""

__all__ = ["CompletionView", "Screen", "step_line"]


class Screen:
    """Owns the live display; a context manager. `history`: metrics of the steps before a resume."""

    def __init__(
        self, num_steps: int, console: Console | None = None, history: Sequence[Mapping[str, Any]] = ()
    ) -> None:
        self.console = console or Console(stderr=True)
        self.state = ScreenState(num_steps, history=tuple(history))
        self._is_live = self.console.is_interactive and shows_info()
        self._stack = ExitStack()
        self._live = Live(get_renderable=lambda: Page(self.state), console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        self._stack.enter_context(lines_on_screen(self._print, has_page=self._is_live))
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._live.stop()
        self._stack.close()

    def phase(self, name: str, detail: str) -> None:
        """What happens now, e.g. phase("sampling", "step 3 of 24"). An end (done, stopped, failed) leaves the page as it is, and what
        is said after that stands below it, where the eye is."""
        self.state.phase, self.state.detail = name, detail
        if self._is_live and name in ENDS:
            self._live.stop()
        level = logging.DEBUG if name in EVERY_STEP else logging.INFO
        logger.log(level, f"{name} {detail}".strip(), extra=ON_PAGE)

    def step(self, metrics: Mapping[str, Any], sample: CompletionView | None) -> None:
        """A finished step."""
        self.state.history = (*self.state.history, metrics)
        self.state.sample = sample
        logger.info(step_line(metrics, self.state.num_steps), extra=ON_PAGE)

    def evaluation(self, label: str, text: str) -> None:
        """A held-out result: evaluation("before", "greedy pass@1 31.4 % ...")."""
        self.state.evaluations[label] = text
        logger.info(f"held out, {label}: {text}", extra=ON_PAGE)

    def _print(self, text: str) -> None:
        """Print a line above the page, or on a plain terminal."""
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def step_line(metrics: Mapping[str, Any], num_steps: int) -> str:
    """A step in one line, for logs."""
    m = metrics
    sync = m["time/sync_s"]
    return (
        f"step {m['step']}/{num_steps}  reward {m['reward/mean']:.3f}  right {100 * m['reward/right_frac']:.1f} %  "
        f"entropy {m['policy/entropy']:.3f}  tokens {m['completion/tokens_mean']:.1f}  "
        f"sample {m['time/rollout_s']:.1f} s ({m['perf/completion_tokens_per_s']:.0f} tok/s)  train {m['time/train_s']:.1f} s  "
        f"sync {sync:.2f} s  canary {m['canary/gap_max']:.1e}  gap {m['mismatch/logprob_diff_mean']:.1e}  v{m['adapter/version']}"
    )
