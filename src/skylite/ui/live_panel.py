"""The live panel of a run: progress, reward curve, metrics, one completion. Its lines never wrap."""

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

from skylite.engine.canary_reading import verdict_of
from skylite.ui.curve import curve, proportional_widths
from skylite.untrusted_text import plain

LABEL_WIDTH = 11
MAX_ROWS = 34
COMPLETION_ROWS = 9
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TALL_ROWS = 30
"""Above this height the reward curve gets several lines."""
RECENT_STEPS = 5
"""The remaining time is estimated from this many steps."""
STALLED = ("✘", "bold red")
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
    """What the panel shows."""

    num_steps: int
    phase: str = "starting"
    detail: str = ""
    work: str = ""
    """Long work that the run waits for, such as the start of an engine."""
    stalled: str = ""
    """Why no step is expected although the run has not ended, such as "dead"; shown instead of the phase."""
    started: float = field(default_factory=time.monotonic)
    history: Sequence[Mapping[str, Any]] = ()
    """Metrics of every step so far."""
    sample: CompletionView | None = None
    evaluations: dict[str, str] = field(default_factory=dict)
    """Label (before, after) -> result."""


@dataclass(frozen=True, slots=True)
class LivePanel:
    """Draws a state to the size of the console, one row less than its height: nothing scrolls."""

    state: ScreenState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, rows = options.max_width - 4, min(console.size.height - 1, MAX_ROWS) - 2
        lines = panel_lines(self.state, width, rows)
        title = Text.assemble(("skylite", "bold"), ("  GRPO + LoRA", "dim"))
        # Crop each line: rich would wrap it, and a panel that changes its height flickers.
        yield Panel(
            Text("\n").join(cropped(line, width) for line in lines[:rows]),
            title=title,
            title_align="left",
            border_style="blue",
        )


def panel_lines(state: ScreenState, width: int, rows: int) -> list[Text]:
    """At most `rows` lines of at most `width` columns."""
    lines = [status_line(state, width), progress_bar(state, width)]
    if state.history:
        lines += [
            Text(),
            *reward_curve(state, width, 5 if rows + 3 > TALL_ROWS else 1),
            *_metric_rows(state, width),
        ]
    lines += [labelled(label, Text(plain(text), "green")) for label, text in state.evaluations.items()]
    room = min(COMPLETION_ROWS, rows - len(lines) - 1)
    if state.sample is not None and room >= 3:
        shown = completion_lines(state.sample, width, room)
        # Pad, so that the panel keeps its height.
        lines += [Text(), *shown, *[Text()] * (room - len(shown))]
    return lines


def status_line(state: ScreenState, width: int) -> Text:
    """Phase and detail on the left, the clock on the right."""
    spinner = SPINNER[int(8 * (time.monotonic() - state.started)) % len(SPINNER)]
    mark, style = STALLED if state.stalled else ENDS.get(state.phase, (spinner, "bold cyan"))
    left = Text.assemble(
        (f"{mark} {state.stalled or state.phase}", style),
        ("  " + plain(state.work or state.detail), "default"),
    )
    return _justified(left, Text(clock(state), "dim"), width)


def progress_bar(state: ScreenState, width: int) -> Text:
    """Steps done of all."""
    done = steps_done(state)
    label = f" {done} of {state.num_steps} steps"
    room = max(0, width - len(label))
    filled = proportional_widths([done, max(0, state.num_steps - done)], room)[0]
    return Text.assemble(("━" * filled, "cyan"), ("─" * (room - filled), "grey37"), (label, "default"))


def reward_curve(state: ScreenState, width: int, height: int) -> list[Text]:
    """The mean reward of each step. The full width stands for all steps, so the curve grows to the right."""
    rewards = [float(m["reward/mean"]) for m in state.history]
    best = max(filter(math.isfinite, rewards), default=math.nan)
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
    low = min(filter(math.isfinite, rewards), default=math.nan)
    top, bottom = f"{best:>{LABEL_WIDTH - 1}.3g}", f"reward {low:>{LABEL_WIDTH - 8}.2g}"
    labels = [top, *[""] * (height - 2), bottom] if height > 1 else ["reward"]
    return [labelled(label, line) for label, line in zip(labels, drawn, strict=True)]


def _metric_rows(state: ScreenState, width: int) -> list[Text]:
    m = state.history[-1]
    length = (
        f"{m['completion/tokens_mean']:.1f} tokens per completion, "
        f"{100 * m['completion/truncated_frac']:.0f} % truncated, entropy {m['policy/entropy']:.3f}"
    )
    right = f"{100 * m['reward/right_frac']:.1f} % of the completions"
    tokens_per_s = m["perf/completion_tokens_per_s"]
    sampled = f"{tokens_per_s:.0f} tokens/s sampled" if math.isfinite(tokens_per_s) else "sampled before"
    speed = f"{sampled}, {m['time/step_s']:.1f} s per step"
    gaps = f"canary gap {m['canary/gap_max']:.1e}, logprob mismatch {m['mismatch/logprob_diff_mean']:.1e}"
    return [
        *([] if has_partial_rewards(state.history) else [labelled("right", Text(right))]),
        labelled("length", Text(length)),
        labelled("speed", Text(speed)),
        labelled("time", time_split(m, width - LABEL_WIDTH)),
        labelled("adapter", adapter_row(m, gaps)),
    ]


def adapter_row(m: Mapping[str, Any], gaps: str) -> Text:
    """The version, what the canary showed about it, and `gaps`."""
    verdict = verdict_of(m.get("canary/verified"))
    style = "green" if verdict == "verified" else "yellow"
    return Text.assemble((f"v{m['adapter/version']}", "bold"), "  ", (verdict, style), f"  {gaps}")


def has_partial_rewards(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a completion got another first score than 0 and 1: then none is right or wrong."""
    return any(m["reward/partial_frac"] > 0 for m in history)


def time_split(m: Mapping[str, Any], width: int) -> Text:
    """A bar with a legend: sample, train, sync and the rest as parts of the step."""
    sync = m["time/sync_s"]
    known = {"sample": m["time/rollout_s"], "train": m["time/train_s"], "sync": sync}
    parts = {**known, "other": max(0.0, m["time/step_s"] - sum(known.values()))}
    styles = dict(zip(parts, ("cyan", "magenta", "green", "grey50"), strict=True))
    total = sum(parts.values()) or 1.0
    legend = Text("  ").join(
        Text(f"{name} {100 * value / total:.0f} %", styles[name]) for name, value in parts.items()
    )
    columns = proportional_widths(list(parts.values()), max(0, min(60, width - legend.cell_len - 2)))
    bar = Text.assemble(*(("█" * n, styles[name]) for name, n in zip(parts, columns, strict=True)))
    return Text.assemble(bar, "  ", legend)


def completion_lines(sample: CompletionView, width: int, rows: int) -> list[Text]:
    """At most `rows` lines: a heading, the end of the question, the completion without its middle if long."""
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
    """Lines of at most `width` columns, without blank lines. Wide characters count twice."""
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
    text = clock_time(time.monotonic() - state.started)
    left = seconds_left(state.history, state.num_steps)
    if left is not None and state.phase not in ENDS and not state.stalled:
        text += f", about {clock_time(left)} to go"
    return text


def seconds_left(history: Sequence[Mapping[str, Any]], num_steps: int) -> float | None:
    """Estimate from the last sampled steps. None: no step is left, or none has a time, as after damage.

    After a resume, steps that were trained from stored completions were short: they do not count.
    """
    left = num_steps - int(history[-1]["step"]) if history else 0
    recent = [
        s
        for m in history[-RECENT_STEPS:]
        if math.isfinite(s := m["time/step_s"]) and not m.get("rollout/stored", 0) > 0
    ]
    return left * sum(recent) / len(recent) if recent and left > 0 else None


def clock_time(seconds: float) -> str:
    """1:02:03 or 2:03."""
    hours, rest = divmod(int(seconds), 3600)
    return f"{hours}:{rest // 60:02d}:{rest % 60:02d}" if hours else f"{rest // 60}:{rest % 60:02d}"


def steps_done(state: ScreenState) -> int:
    """Steps that are complete."""
    return int(state.history[-1]["step"]) if state.history else 0


def labelled(label: str, content: Text) -> Text:
    """A row of the panel."""
    return Text.assemble((set_cell_size(plain(label), LABEL_WIDTH - 1) + " ", "dim"), content)


def _justified(left: Text, right: Text, width: int) -> Text:
    left.truncate(max(0, width - right.cell_len - 1), overflow="ellipsis")
    return Text.assemble(left, " " * max(1, width - left.cell_len - right.cell_len), right)


def cropped(line: Text, width: int) -> Text:
    """The line, cut to the width."""
    line.truncate(width, overflow="ellipsis")
    return line
