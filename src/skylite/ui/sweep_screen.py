"""The screen of a sweep: a row for each policy on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from skylite.report.read_run import number
from skylite.ui.dashboard import Screen
from skylite.ui.live_panel import ScreenState
from skylite.ui.logs import lines_on_screen, shows_info


class MemberScreen(Screen):
    """Keeps the state of one policy, and shows nothing by itself but its lines."""

    def __init__(self, num_steps: int) -> None:
        super().__init__(num_steps)
        self._is_live = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Nothing to do: the sweep's screen stays open."""


class SweepScreen:
    """Owns the live table; a context manager."""

    def __init__(self, states: Mapping[str, ScreenState], console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self._is_live = self.console.is_interactive and shows_info()
        self._stack = ExitStack()
        self._live = Live(
            get_renderable=lambda: policies_table(states), console=self.console, refresh_per_second=4
        )

    def __enter__(self) -> Self:
        self._stack.enter_context(lines_on_screen(self._print, has_panel=self._is_live))
        if self._is_live:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._is_live:
            self._live.stop()
        self._stack.close()

    def _print(self, text: str) -> None:
        self.console.print(text, markup=False, highlight=False, emoji=False, soft_wrap=True)


def policies_table(states: Mapping[str, ScreenState]) -> Table:
    """A row for each policy: step, reward, entropy, the last held-out result, what it does now."""
    table = Table(box=None, pad_edge=False)
    for title in ("policy", "step", "reward", "entropy", "held out", "now"):
        table.add_column(title)
    for name, state in states.items():
        last = state.history[-1] if state.history else {}
        held_out = list(state.evaluations.values())
        cells = [
            name,
            f"{last.get('step', 0)}/{state.num_steps}",
            f"{number(last, 'reward/mean'):.3f}" if last else "-",
            f"{number(last, 'policy/entropy'):.3f}" if last else "-",
            held_out[-1] if held_out else "-",
            state.phase,
        ]
        table.add_row(*map(Text, cells))
    return table
