"""The screen of a run: one live page on a terminal, one clean line a step elsewhere. Shows plain values; knows nothing of the run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

BARS = " ▁▂▃▄▅▆▇█"


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
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, Any] = field(default_factory=dict)
    sample: CompletionView | None = None
    evaluations: list[str] = field(default_factory=list)


class Screen:
    """Owns the live display; a context manager."""

    def __init__(self, num_steps: int, console: Console | None = None) -> None:
        self.console = console or Console(stderr=True)
        self.state = ScreenState(num_steps)
        self._live = Live(get_renderable=lambda: render(self.state), console=self.console, refresh_per_second=4, transient=False)
        self._is_live = self.console.is_terminal

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._is_live:
            self._live.stop()

    def phase(self, name: str, detail: str) -> None:
        """What happens now, e.g. phase("sampling", "step 3 of 24")."""
        quiet = name in ("sampling", "training", "syncing")
        self.state.phase, self.state.detail = name, detail
        if not self._is_live and not quiet:
            self.say(f"{name} {detail}".strip())

    def step(self, metrics: dict[str, Any], sample: CompletionView | None) -> None:
        """A finished step."""
        self.state.rewards.append(metrics["reward/mean"])
        self.state.metrics, self.state.sample = metrics, sample
        if not self._is_live:
            self.say(step_line(metrics, self.state.num_steps))

    def evaluation(self, label: str, text: str) -> None:
        """A held-out result."""
        self.state.evaluations.append(f"{label}: {text}")
        if not self._is_live:
            self.say(f"held out, {label}: {text}")

    def say(self, text: str) -> None:
        """A note that stays: above the page, or a line of its own."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)


def step_line(metrics: dict[str, Any], num_steps: int) -> str:
    """A step in one line, for logs."""
    m = metrics
    return (
        f"step {m['step']}/{num_steps}  reward {m['reward/mean']:.3f}  entropy {m['policy/entropy']:.3f}  "
        f"tokens {m['completion/tokens_mean']:.1f}  sample {m['time/rollout_s']:.1f} s ({m['perf/completion_tokens_per_s']:.0f} tok/s)  "
        f"train {m['time/train_s']:.1f} s  sync {m['time/publish_s'] + m['time/load_s']:.2f} s  canary {m['canary/gap_max']:.1e}  "
        f"gap {m['mismatch/logprob_diff_mean']:.1e}  v{m['adapter/version']}"
    )


def sparkline(values: list[float], width: int) -> str:
    """The last `width` values of 0..1 as bars."""
    return "".join(BARS[max(1, min(8, 1 + int(8 * v)))] for v in values[-width:])


def render(state: ScreenState) -> RenderableType:
    """The page: progress, curve, numbers, one completion."""
    done = int(state.metrics.get("step", 0))
    head = Table.grid(expand=True, padding=(0, 1))
    head.add_column(ratio=1, no_wrap=True)
    head.add_column(justify="right", no_wrap=True)
    head.add_row(Text(f"{state.phase} {state.detail}", style="bold cyan"), Text(_clock(state, done), style="dim"))
    parts: list[RenderableType] = [head, ProgressBar(total=state.num_steps, completed=done)]
    if state.rewards:
        parts.append(_numbers(state))
    parts += [Text(f"held out, {e}", style="green", no_wrap=True, overflow="ellipsis") for e in state.evaluations]
    if state.sample is not None:
        parts.append(_completion_panel(state.sample))
    return Panel(Group(*parts), title=f"skylite  step {done} of {state.num_steps}", border_style="blue")


def _clock(state: ScreenState, done: int) -> str:
    elapsed = time.monotonic() - state.started
    text = f"{int(elapsed // 60)}:{int(elapsed % 60):02d}"
    if done and done < state.num_steps:
        left = state.metrics["time/step_s"] * (state.num_steps - done)
        text += f", about {int(left // 60)}:{int(left % 60):02d} to go"
    return text


def _numbers(state: ScreenState) -> Table:
    m = state.metrics
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(no_wrap=True, overflow="ellipsis")
    reward = Text(sparkline(state.rewards, 40), style="yellow")
    reward.append(f"  {m['reward/mean']:.3f}  (first {state.rewards[0]:.3f})", style="bold")
    table.add_row("reward", reward)
    table.add_row(
        "completions",
        f"{m['completion/tokens_mean']:.1f} tokens, {100 * m['completion/truncated_frac']:.0f} % cut, entropy {m['policy/entropy']:.3f}",
    )
    table.add_row("speed", f"{m['perf/completion_tokens_per_s']:.0f} tokens/s sampled, {m['time/step_s']:.1f} s a step")
    table.add_row("time", _split(m))
    gap = f"canary gap {m['canary/gap_max']:.1e}, trainer-engine gap {m['mismatch/logprob_diff_mean']:.1e}"
    table.add_row("adapter", f"v{m['adapter/version']}, {m['adapter/bytes'] / 2**20:.0f} MiB; {gap}")
    return table


def _split(m: dict[str, Any]) -> Text:
    """Sample, train and sync as shares of the step."""
    sync = m["time/publish_s"] + m["time/load_s"] + m["time/canary_s"]
    text = Text()
    for name, seconds, style in (("sample", m["time/rollout_s"], "cyan"), ("train", m["time/train_s"], "magenta"), ("sync", sync, "green")):
        share = seconds / m["time/step_s"]
        text.append("█" * round(24 * share), style=style)
        text.append(f" {name} {100 * share:.0f} %  ", style=style)
    return text


def _completion_panel(sample: CompletionView) -> Panel:
    body = Text(no_wrap=False)
    body.append(sample.question.strip()[-240:] + "\n", style="dim")
    body.append(sample.completion.strip()[-320:])
    return Panel(body, title=f"a completion, reward {sample.reward:g}, answer {sample.answer}", border_style="dim")
