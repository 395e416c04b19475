"""The panel of a run, for `train` and `watch`: progress, findings, curves, one completion. No line wraps."""

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
from skylite.report.alarms import Alarm
from skylite.report.read_run import HeldOut, number
from skylite.ui.curve import curve, proportional_widths
from skylite.untrusted_text import plain

LABEL_WIDTH, VALUES_WIDTH = 11, 26
MAX_ROWS = 34
"""Of a panel that does not fill the screen."""
COMPLETION_ROWS, MIN_COMPLETION_ROWS = 9, 3
FINDING_LINES = 2
SPINNER = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
TALL_ROWS = 27
"""Above this height the reward curve gets several lines."""
RECENT_STEPS = 5
"""The remaining time is estimated from this many steps."""
STALLED = ("✘", "bold red")
ENDS = {"done": ("✔", "bold green"), "stopped": ("■", "bold yellow"), "failed": ("✘", "bold red")}
CURVES = (
    ("KL", "policy/kl_ref", "{:.3g}", 1),
    ("entropy", "policy/entropy", "{:.3f}", 1),
    ("mismatch", "mismatch/logprob_diff_mean", "{:.1e}", 1),
    ("length", "completion/tokens_mean", "{:.1f}", 1),
    ("truncated", "completion/truncated_frac", "{:.0f} %", 100),
    ("no signal", "groups/zero_std_sampled_frac", "{:.0f} %", 100),
)
"""Label, metric, form and factor. A curve without a value is left out."""
PARTS = {"sample": "time/rollout_s", "train": "time/train_s", "sync": "time/sync_s"}
PART_STYLES = ("cyan", "magenta", "green", "grey50")


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionView:
    """One completion to show."""

    question: str
    completion: str
    reward: float
    answer: str
    place: str = ""
    """Which one it is, such as `step 4, best first: 1 of 64`."""


@dataclass(slots=True)
class ScreenState:
    """What the panel shows."""

    num_steps: int
    name: str = ""
    """Of the run, in the title."""
    phase: str = "starting"
    detail: str = ""
    work: str = ""
    """Long work that the run waits for, such as the start of an engine."""
    stalled: str = ""
    """Why no step is expected although the run has not ended, such as "dead"; shown instead of the phase."""
    started: float = field(default_factory=time.monotonic)
    history: Sequence[Mapping[str, Any]] = ()
    """Metrics of every step so far."""
    alarms: Sequence[Alarm] = ()
    unreadable: Sequence[str] = ()
    held_out: Sequence[HeldOut] = ()
    evaluations: dict[str, str] = field(default_factory=dict)
    """Label (before, after) -> result."""
    sample: CompletionView | None = None
    footer: str = ""


@dataclass(frozen=True, slots=True)
class LivePanel:
    """Draws a state to the size of the console, one row less than its height: nothing scrolls."""

    state: ScreenState
    fills_screen: bool = False

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, height = options.max_width - 4, console.size.height - 1
        rows = max(4, height if self.fills_screen else min(height, MAX_ROWS)) - 2
        lines = panel_lines(self.state, width, rows, rows if self.fills_screen else COMPLETION_ROWS)
        # Crop each line: rich would wrap it, and a panel that changes its height flickers.
        yield Panel(
            Text("\n").join(cropped(line, width) for line in lines[:rows]),
            title=Text.assemble(("skylite", "bold"), (f"  {plain(self.state.name)}".rstrip(), "dim")),
            title_align="left",
            border_style="blue",
        )


def panel_lines(
    state: ScreenState, width: int, rows: int, completion_rows: int = COMPLETION_ROWS
) -> list[Text]:
    """At most `rows` lines of at most `width` columns."""
    lines = [status_line(state, width), progress_bar(state, width)]
    for alarm in state.alarms:
        style = "bold red" if alarm.is_alarm else "yellow"
        lines += [Text(line, style) for line in wrapped(f"! {alarm.text}", width)[:FINDING_LINES]]
    lines += [Text(plain(text), "red") for text in state.unreadable]
    if state.history:
        lines += [
            *reward_curve(state, width, 4 if rows > TALL_ROWS else 1),
            *_held_out_row(state, width),
            *(line for key in CURVES for line in _curve_row(state, *key, width=width)),
            *_last_rows(state, width),
        ]
    lines += [labelled(label, Text(plain(text), "green")) for label, text in state.evaluations.items()]
    footer = [Text(state.footer, "dim")] if state.footer else []
    room = min(completion_rows, rows - len(lines) - len(footer))
    if state.sample is not None and room >= MIN_COMPLETION_ROWS:
        shown = completion_lines(state.sample, width, room)
        # Pad, so that the panel keeps its height.
        lines += [*shown, *[Text()] * (room - len(shown))]
    return [*lines[: rows - len(footer)], *footer]


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
    """The mean reward of each step, or its loss where nothing is sampled.

    The full width stands for all steps, so the curve grows to the right.
    """
    name = "reward" if was_sampled(state.history) else "loss"
    rewards = [number(m, "reward/mean" if name == "reward" else "loss/policy") for m in state.history]
    best = max(filter(math.isfinite, rewards), default=math.nan)
    summary = Text.assemble(
        (f"{rewards[-1]:.3f}", "bold yellow"), (f"  first {rewards[0]:.3f}  best {best:.3f}", "dim")
    )
    room = max(1, width - LABEL_WIDTH - summary.cell_len - 2)
    drawn = [Text(line, "yellow") for line in stretched(rewards, room, state.num_steps, height)]
    drawn[-1] = Text.assemble(drawn[-1], "  ", summary)
    low = min(filter(math.isfinite, rewards), default=math.nan)
    top, bottom = f"{best:>{LABEL_WIDTH - 1}.3g}", f"{name} {low:>{LABEL_WIDTH - len(name) - 2}.2g}"
    labels = [top, *[""] * (height - 2), bottom] if height > 1 else [name]
    return [labelled(label, line) for label, line in zip(labels, drawn, strict=True)]


def _held_out_row(state: ScreenState, width: int) -> list[Text]:
    """Scores at the columns of their versions."""
    held_out = state.held_out
    if not held_out:
        return []
    means = {h.version: h.score.mean for h in held_out}
    first = f"  first {held_out[0].score.value}" if len(means) > 1 else ""
    room = max(1, width - LABEL_WIDTH - VALUES_WIDTH - 2)
    columns = {min(room - 1, v * room // max(1, state.num_steps)): mean for v, mean in means.items()}
    is_share = all(h.score.is_binary for h in held_out)
    scale = (0.0, 1.0) if is_share else (min(means.values()), max(means.values()))
    bars = curve([columns.get(k, math.nan) for k in range(room)], room, 1, scale)[0]
    last = Text.assemble((held_out[-1].score.value, "bold"), (first, "dim"))
    return [labelled("held-out", Text.assemble((bars.ljust(room), "green"), "  ", last))]


def _curve_row(state: ScreenState, label: str, key: str, form: str, factor: float, width: int) -> list[Text]:
    """A curve on its own scale. As in the reward's, the full width stands for all steps."""
    values = [factor * number(m, key) for m in state.history]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return []
    room = max(1, width - LABEL_WIDTH - VALUES_WIDTH - 2)
    bars = stretched(values, room, state.num_steps, 1)[0][:room].ljust(room)
    last, first = form.format(finite[-1]), f"  first {form.format(finite[0])}"
    return [labelled(label, Text.assemble((bars, "cyan"), "  ", (last, "bold"), (first, "dim")))]


def stretched(values: Sequence[float], room: int, num_steps: int, height: int) -> list[str]:
    """A curve of the steps so far, in as many columns of `room` as they are of all steps."""
    stretch = max(1, room // num_steps)
    columns = max(1, min(room, room * len(values) // num_steps)) if stretch == 1 else len(values)
    return ["".join(c * stretch for c in line) for line in curve(values, columns, height)]


def _last_rows(state: ScreenState, width: int) -> list[Text]:
    m = state.history[-1]
    right, tokens = number(m, "reward/right_frac"), number(m, "perf/completion_tokens_per_s")
    sampled = f"{tokens:.0f} tokens/s sampled, " if math.isfinite(tokens) else "sampled before, "
    speed = f"{sampled if was_sampled([m]) else ''}{number(m, 'time/step_s'):.1f} s per step"
    for key, what in (("mem/rss_peak_bytes", "peak memory"), ("mem/gpu_peak_bytes", "on the GPU")):
        if math.isfinite(memory := number(m, key)):
            speed += f", {memory / 2**30:.1f} GiB {what}"
    has_right = math.isfinite(right) and not has_partial_rewards(state.history)
    verdict = verdict_of(m.get("canary/verified"))
    adapter = Text.assemble(
        (version_name(m), "bold"), "  ", (verdict, "green" if verdict == "verified" else "yellow"),
        f"  canary gap {number(m, 'canary/gap_max'):.1e}",
    )  # fmt: skip
    return [
        *([labelled("right", Text(f"{100 * right:.1f} % of the completions"))] if has_right else []),
        labelled("speed", Text(speed)),
        *time_split(m, width - LABEL_WIDTH),
        labelled("adapter", adapter),
    ]


def version_name(m: Mapping[str, Any]) -> str:
    """Such as v12."""
    version = number(m, "adapter/version")
    return f"v{int(version)}" if math.isfinite(version) else "v?"


def was_sampled(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the steps learned from what an engine sampled, and not from prepared rows."""
    return any("reward/mean" in m for m in history) or not any("loss/policy" in m for m in history)


def has_partial_rewards(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a completion got another first score than 0 and 1: then none is right or wrong."""
    return any(number(m, "reward/partial_frac") > 0 for m in history)


def time_split(m: Mapping[str, Any], width: int) -> list[Text]:
    """A bar with a legend: sample, train, sync and the rest as parts of the step; none without times."""
    seconds, step = {name: number(m, key) for name, key in PARTS.items()}, number(m, "time/step_s")
    if not all(map(math.isfinite, (step, *seconds.values()))):
        return []
    parts = {**seconds, "other": max(0.0, step - sum(seconds.values()))}
    total = sum(parts.values()) or 1.0
    legend = Text("  ").join(
        Text(f"{name} {100 * part / total:.0f} %", style)
        for (name, part), style in zip(parts.items(), PART_STYLES, strict=True)
    )
    columns = proportional_widths(list(parts.values()), max(0, min(60, width - legend.cell_len - 2)))
    bar = Text.assemble(*(("█" * n, style) for n, style in zip(columns, PART_STYLES, strict=True)))
    return [labelled("time", Text.assemble(bar, "  ", legend))]


def completion_lines(sample: CompletionView, width: int, rows: int) -> list[Text]:
    """At most `rows` lines: a heading, the end of the question, the completion without its middle if long."""
    place = plain(sample.place or "a completion")
    heading = Text(f"── {place}: reward {sample.reward:g}, answer {plain(sample.answer)} ", "dim")
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
        if math.isfinite(s := number(m, "time/step_s")) and not number(m, "rollout/stored") > 0
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
