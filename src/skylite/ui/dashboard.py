"""The screen of a run: one live page on a terminal, one clean line a step elsewhere. Shows plain values; knows nothing of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.live import Live

from skylite.ui.page import ENDS, CompletionView, Page, ScreenState

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
        self._is_live = self.console.is_interactive
        self._live = Live(get_renderable=lambda: Page(self.state), console=self.console, refresh_per_second=4)

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._live.stop()

    def phase(self, name: str, detail: str) -> None:
        """What happens now, e.g. phase("sampling", "step 3 of 24"). An end (done, stopped, failed) leaves the page as it is, and what
        is said after that stands below it, where the eye is."""
        self.state.phase, self.state.detail = name, detail
        if self._is_live and name in ENDS:
            self._live.stop()
        if not self._is_live and name not in EVERY_STEP:
            self.say(f"{name} {detail}".strip())

    def step(self, metrics: Mapping[str, Any], sample: CompletionView | None) -> None:
        """A finished step."""
        self.state.history = (*self.state.history, metrics)
        self.state.sample = sample
        if not self._is_live:
            self.say(step_line(metrics, self.state.num_steps))

    def evaluation(self, label: str, text: str) -> None:
        """A held-out result: evaluation("before", "greedy pass@1 31.4 % ...")."""
        self.state.evaluations[label] = text
        if not self._is_live:
            self.say(f"held out, {label}: {text}")

    def say(self, text: str) -> None:
        """A note that stays: above the page, or a line of its own."""
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
