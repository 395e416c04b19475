"""The screen of a sweep: a row for each policy on a terminal, lines elsewhere."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.table import Table
from rich.text import Text

from skylite.report.read_run import number
from skylite.ui.dashboard import LiveDisplay, Screen
from skylite.ui.live_panel import ScreenState


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


class SweepScreen(LiveDisplay):
    """The live table of all policies."""

    def __init__(self, states: Mapping[str, ScreenState], console: Console | None = None) -> None:
        super().__init__(lambda: policies_table(states), console)


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
