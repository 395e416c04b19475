"""The screen of `skylite watch`: progress, curves, time split, findings in words, and one completion."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.panel import Panel
from rich.text import Text

from skylite.report.alarms import Alarm
from skylite.report.completions import Completion
from skylite.report.read_run import HeldOut, RunFacts, number
from skylite.ui.curve import curve
from skylite.ui.live_panel import (
    LABEL_WIDTH,
    TALL_ROWS,
    CompletionView,
    ScreenState,
    adapter_row,
    completion_lines,
    cropped,
    labelled,
    progress_bar,
    reward_curve,
    status_line,
    time_split,
    wrapped,
)
from skylite.untrusted_text import plain

KEYS_HELP = "←→ completion  ↑↓ step  b best  w worst  s as stored  n newest  q quit"
STEP_KEYS = (
    "reward/mean", "reward/right_frac", "reward/partial_frac", "policy/entropy", "completion/tokens_mean",
    "completion/truncated_frac", "perf/completion_tokens_per_s", "canary/gap_max", "canary/verified",
    "mismatch/logprob_diff_mean", "time/step_s", "time/rollout_s", "time/train_s", "time/sync_s",
)  # fmt: skip
"""Metrics that a line or a row shows; nan where a step lacks one."""
CURVES = (
    ("KL", "policy/kl_ref", "{:.3g}", 1),
    ("entropy", "policy/entropy", "{:.3f}", 1),
    ("mismatch", "mismatch/logprob_diff_mean", "{:.1e}", 1),
    ("length", "completion/tokens_mean", "{:.1f}", 1),
    ("truncated", "completion/truncated_frac", "{:.0f} %", 100),
    ("no signal", "groups/zero_std_sampled_frac", "{:.0f} %", 100),
)
VALUES_WIDTH = 26
FINDING_LINES = 2
MIN_COMPLETION_ROWS = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchState:
    """What the screen shows."""

    facts: RunFacts
    alarms: Sequence[Alarm]
    detail: str
    seconds: float
    """Time of the run so far."""
    stalled: str = ""
    """Why no step is expected although the run has not ended."""
    completions: Sequence[Completion] = ()
    index: int = 0
    """Of the shown completion."""
    choice: str = ""
    """Which completions: their step and order."""
    has_keys: bool = False


@dataclass(frozen=True, slots=True)
class WatchPanel:
    """Draws a state to the size of the console; nothing scrolls."""

    state: WatchState

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        width, rows = options.max_width - 4, max(4, console.size.height - 3)
        lines = watch_lines(self.state, width, rows)
        yield Panel(
            Text("\n").join(cropped(line, width) for line in lines[:rows]),
            title=Text.assemble(("skylite watch", "bold"), (f"  {plain(self.state.facts.name)}", "dim")),
            title_align="left",
            border_style="blue",
        )


def watch_lines(state: WatchState, width: int, rows: int) -> list[Text]:
    """At most `rows` lines of at most `width` columns."""
    facts = state.facts
    screen = screen_state(state)
    lines = [status_line(screen, width), progress_bar(screen, width)]
    lines += [line for alarm in state.alarms for line in _finding(alarm, width)]
    lines += [Text(plain(text), "red") for text in facts.unreadable]
    if screen.history:
        lines += reward_curve(screen, width, 4 if rows > TALL_ROWS else 1)
        lines += _held_out_row(facts.held_out, facts.run.config.num_steps, width)
        lines += [line for c in CURVES for line in _curve_row(facts, *c, width=width)]
        lines += _last_rows(screen.history[-1], facts, width)
    footer = [Text(KEYS_HELP, "dim")] if state.has_keys else []
    room = rows - len(lines) - len(footer)
    if state.completions and room >= MIN_COMPLETION_ROWS:
        shown = _completion(state, width, room)
        lines += [*shown, *[Text()] * (room - len(shown))]
    return [*lines[: rows - len(footer)], *footer]


def screen_state(state: WatchState) -> ScreenState:
    """The state of the panel of `train`."""
    facts = state.facts
    return ScreenState(
        facts.run.config.num_steps,
        phase=facts.phase,
        detail=state.detail,
        stalled=state.stalled,
        started=time.monotonic() - state.seconds,
        history=[filled(m) for m in facts.metrics],
    )


def filled(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The metrics that the screen reads as numbers; nan for what is missing or no number."""
    version = number(metrics, "adapter/version")
    return {
        "step": int(metrics["step"]),
        "adapter/version": int(version) if math.isfinite(version) else "?",
        **{key: number(metrics, key) for key in STEP_KEYS},
    }


def _finding(alarm: Alarm, width: int) -> list[Text]:
    style = "bold red" if alarm.is_alarm else "yellow"
    return [Text(line, style) for line in wrapped(f"! {alarm.text}", width)[:FINDING_LINES]]


def _curve_row(facts: RunFacts, label: str, key: str, form: str, factor: float, width: int) -> list[Text]:
    values = [factor * v for v in facts.series(key)]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return []
    rest = f"first {form.format(finite[0])}"
    return [_row(label, values, facts.run.config.num_steps, form.format(finite[-1]), rest, width)]


def _held_out_row(held_out: Sequence[HeldOut], num_steps: int, width: int) -> list[Text]:
    """Accuracies at the columns of their versions."""
    if not held_out:
        return []
    means = {h.version: h.score.mean for h in held_out}
    text = f"  first {held_out[0].score.value}" if len(means) > 1 else ""
    room = max(1, width - LABEL_WIDTH - VALUES_WIDTH - 2)
    columns = {min(room - 1, v * room // max(1, num_steps)): mean for v, mean in means.items()}
    is_share = all(h.score.is_binary for h in held_out)
    scale = (0.0, 1.0) if is_share else (min(means.values()), max(means.values()))
    bars = curve([columns.get(k, math.nan) for k in range(room)], room, 1, scale)[0]
    last = Text.assemble((held_out[-1].score.value, "bold"), (text, "dim"))
    return [labelled("held-out", Text.assemble((bars.ljust(room), "green"), "  ", last))]


def _row(label: str, values: Sequence[float], num_steps: int, last: str, rest: str, width: int) -> Text:
    """A curve on its own scale. As in the reward's, the full width stands for all steps."""
    room = max(1, width - LABEL_WIDTH - VALUES_WIDTH - 2)
    finite = [v for v in values if math.isfinite(v)]
    stretch = max(1, room // num_steps)
    columns = max(1, min(room, room * len(values) // num_steps))
    bars = curve(values, columns if stretch == 1 else len(values), 1, (min(finite), max(finite)))[0]
    drawn = "".join(c * stretch for c in bars)[:room].ljust(room)
    return labelled(label, Text.assemble((drawn, "cyan"), "  ", (last, "bold"), (f"  {rest}", "dim")))


def _last_rows(m: Mapping[str, Any], facts: RunFacts, width: int) -> list[Text]:
    speed = f"{m['perf/completion_tokens_per_s']:.0f} tokens/s sampled, {m['time/step_s']:.1f} s per step"
    for key, what in (("mem/rss_peak_bytes", "peak memory"), ("mem/gpu_peak_bytes", "on the GPU")):
        if math.isfinite(memory := number(facts.metrics[-1], key)):
            speed += f", {memory / 2**30:.1f} GiB {what}"
    rows = [labelled("speed", Text(speed))]
    if all(math.isfinite(m[key]) for key in ("time/step_s", "time/rollout_s", "time/train_s", "time/sync_s")):
        rows.append(labelled("time", time_split(m, width - LABEL_WIDTH)))
    rows.append(labelled("adapter", adapter_row(m, f"canary gap {m['canary/gap_max']:.1e}")))
    return rows


def _completion(state: WatchState, width: int, rows: int) -> list[Text]:
    c = state.completions[state.index]
    place = f"{state.choice}: {state.index + 1} of {len(state.completions)}, {c.prompt_id}, {c.tokens} tokens"
    view = CompletionView(question=c.question, completion=c.text, reward=c.reward, answer=c.answer)
    return [Text(plain(place), "bold"), *completion_lines(view, width, rows - 1)]
