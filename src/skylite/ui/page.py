"""The page of a run: progress, reward curve, numbers, one completion. Fills the width and never wraps, whatever a model wrote."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.cells import cell_len, chop_cells, set_cell_size
from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.text import Text

from skylite.ui.curve import curve, shares
from skylite.ui.logs import plain

LABEL_WIDTH = 11
MAX_ROWS = 34
COMPLETION_ROWS = 9
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TALL = 30
"""Rows from which on the reward curve gets several lines."""
RECENT = 5
"""Steps whose mean time the forecast goes by."""
ENDS = {"done": ("✔", "bold green"), "stopped": ("■", "bold yellow"), "failed": ("✘", "bold red")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionView:
    """One completion to show."""

    question: str
    completion: str
    reward: float
    answer: str


@dataclass(slots=True)
class ScreenState:
    """What the page shows now."""

    num_steps: int
    phase: str = "starting"
    detail: str = ""
    started: float = field(default_factory=time.monotonic)
    history: Sequence[Mapping[str, Any]] = ()
    """Metrics of every step so far."""
    sample: CompletionView | None = None
    evaluations: dict[str, str] = field(default_factory=dict)
    """Label (before, after) to result, in words."""


@dataclass(frozen=True, slots=True)
class Page:
    """Draws a state into the console's size; at most as tall as the console less one row, so that nothing scrolls."""

    state: ScreenState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, rows = options.max_width - 4, min(console.size.height - 1, MAX_ROWS) - 2
        lines = page_lines(self.state, width, rows)
        title = Text.assemble(("skylite", "bold"), ("  GRPO + LoRA", "dim"))
        # Cropped here, line by line: rich would wrap what is too long, and a page that changes its height flickers.
        yield Panel(
            Text("\n").join(_fitted(line, width) for line in lines[:rows]),
            title=title,
            title_align="left",
            border_style="blue",
        )


def page_lines(state: ScreenState, width: int, rows: int) -> list[Text]:
    """At most `rows` lines for a page of `width` columns."""
    lines = [_head(state, width), _progress(state, width)]
    if state.history:
        lines += [Text(), *_reward(state, width, 5 if rows + 3 > TALL else 1), *_numbers(state, width)]
    lines += [_row(label, Text(text, "green")) for label, text in state.evaluations.items()]
    room = min(COMPLETION_ROWS, rows - len(lines) - 1)
    if state.sample is not None and room >= 3:
        shown = completion_lines(state.sample, width, room)
        # Filled up, so that the page keeps its height from step to step.
        lines += [Text(), *shown, *[Text()] * (room - len(shown))]
    return lines


def _head(state: ScreenState, width: int) -> Text:
    mark, style = ENDS.get(
        state.phase, (SPINNER[int(8 * (time.monotonic() - state.started)) % len(SPINNER)], "bold cyan")
    )
    left = Text.assemble((f"{mark} {state.phase}", style), ("  " + state.detail, "default"))
    return _both_ends(left, Text(clock(state), "dim"), width)


def _progress(state: ScreenState, width: int) -> Text:
    done = steps_done(state)
    label = f" {done} of {state.num_steps} steps"
    room = max(0, width - len(label))
    filled = shares([done, max(0, state.num_steps - done)], room)[0]
    return Text.assemble(("━" * filled, "cyan"), ("─" * (room - filled), "grey37"), (label, "default"))


def _reward(state: ScreenState, width: int, height: int) -> list[Text]:
    """The curve of mean rewards; its width stands for all steps of the run, so it grows to the right as the run goes on."""
    rewards = [float(m["reward/mean"]) for m in state.history]
    best = max(
        filter(math.isfinite, rewards), default=math.nan
    )  # a step whose rewards were no numbers has none
    summary = Text.assemble(
        (f"{rewards[-1]:.3f}", "bold yellow"), (f"  first {rewards[0]:.3f}  best {best:.3f}", "dim")
    )
    room = max(1, width - LABEL_WIDTH - summary.cell_len - 2)
    stretch = max(1, room // state.num_steps)
    lines = curve(
        rewards,
        max(1, min(room, room * len(rewards) // state.num_steps)) if stretch == 1 else len(rewards),
        height,
    )
    drawn = [Text("".join(c * stretch for c in line), "yellow") for line in lines]
    drawn[-1] = Text.assemble(drawn[-1], "  ", summary)
    labels = (
        [f"{max(1.0, *rewards):>{LABEL_WIDTH - 1}.3g}", *[""] * (height - 2), "reward"]
        if height > 1
        else ["reward"]
    )
    return [_row(label, line) for label, line in zip(labels, drawn, strict=True)]


def _numbers(state: ScreenState, width: int) -> list[Text]:
    m = state.history[-1]
    cut = f"{100 * m['completion/truncated_frac']:.0f} % cut short"
    length = (
        f"{m['completion/tokens_mean']:.1f} tokens a completion, {cut}, entropy {m['policy/entropy']:.3f}"
    )
    speed = f"{m['perf/completion_tokens_per_s']:.0f} tokens/s sampled, {m['time/step_s']:.1f} s a step"
    gaps = f"canary gap {m['canary/gap_max']:.1e}, trainer-engine gap {m['mismatch/logprob_diff_mean']:.1e}"
    return [
        _row("accuracy", Text(f"{100 * m['reward/right_frac']:.1f} % of this step's completions are right")),
        _row("length", Text(length)),
        _row("speed", Text(speed)),
        _row("time", time_split(m, width - LABEL_WIDTH)),
        _row("adapter", Text.assemble((f"v{m['adapter/version']}", "bold"), f"  {gaps}")),
    ]


def time_split(m: Mapping[str, Any], width: int) -> Text:
    """One bar: sample, train, sync and the rest as parts of the step, with a legend."""
    sync = m["time/sync_s"]
    known = {"sample": m["time/rollout_s"], "train": m["time/train_s"], "sync": sync}
    parts = {**known, "other": max(0.0, m["time/step_s"] - sum(known.values()))}
    styles = dict(zip(parts, ("cyan", "magenta", "green", "grey50"), strict=True))
    total = sum(parts.values()) or 1.0
    legend = Text("  ").join(
        Text(f"{name} {100 * value / total:.0f} %", styles[name]) for name, value in parts.items()
    )
    columns = shares(list(parts.values()), max(0, min(60, width - legend.cell_len - 2)))
    bar = Text.assemble(*(("█" * n, styles[name]) for name, n in zip(parts, columns, strict=True)))
    return Text.assemble(bar, "  ", legend)


def completion_lines(sample: CompletionView, width: int, rows: int) -> list[Text]:
    """A heading, the end of the question, the completion (its middle left out where it is long): at most `rows` lines."""
    heading = Text(f"── a completion: reward {sample.reward:g}, answer {plain(sample.answer)} ", "dim")
    heading.append("─" * max(0, width - heading.cell_len), "dim")
    body = rows - 1
    answer = wrapped(sample.completion, width)
    question = wrapped(sample.question, width)
    kept = question[-max(1, min(len(question), body // 3)) :]
    room = body - len(kept)
    if len(answer) > room:
        answer = [*answer[: room - 2], "...", answer[-1]] if room > 2 else answer[-room:]
    return [heading, *(Text(line, "dim") for line in kept), *(Text(line) for line in answer)]


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; wide characters count twice, and blank lines are left out."""
    lines: list[str] = []
    for paragraph in text.splitlines():
        line = ""
        for word in plain(paragraph).split():
            if line and cell_len(line) + 1 + cell_len(word) > width:
                lines.append(line)
                line = ""
            *full, line = chop_cells(f"{line} {word}" if line else word, width)
            lines += full
        lines += [line] if line else []
    return lines


def clock(state: ScreenState) -> str:
    """`4:12, about 3:50 to go`."""
    text = minutes(time.monotonic() - state.started)
    left = state.num_steps - steps_done(state)
    if state.history and left > 0 and state.phase not in ENDS:
        recent = [m["time/step_s"] for m in state.history[-RECENT:]]
        text += f", about {minutes(left * sum(recent) / len(recent))} to go"
    return text


def minutes(seconds: float) -> str:
    """1:02:03 or 2:03."""
    whole = int(seconds)
    hours, rest = divmod(whole, 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def steps_done(state: ScreenState) -> int:
    """Steps that are complete."""
    return int(state.history[-1]["step"]) if state.history else 0


def _row(label: str, content: Text) -> Text:
    return Text.assemble((set_cell_size(plain(label), LABEL_WIDTH - 1) + " ", "dim"), content)


def _both_ends(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - right.cell_len), right)


def _fitted(line: Text, width: int) -> Text:
    line.truncate(width, overflow="ellipsis")
    return line
