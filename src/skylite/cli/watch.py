"""Watch a run, live or finished. Shows progress, curves, warnings and completions from its folder.

Keys: arrows choose completion and step, b best first, w worst first, s stored order, n newest, q quits.
Prints lines where there is no terminal.
"""

from __future__ import annotations

import json
import math
import os
import select
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.live import Live

from skylite.cli.options import RunOrNewest, newest_run
from skylite.errors import SkyliteError
from skylite.report.alarms import Alarm, find_alarms
from skylite.report.completions import Completion, Filter, Order, read_training
from skylite.report.read_run import RunFacts, age_s, age_text, read_facts
from skylite.run.metrics_file import metrics_line
from skylite.run.own_folders import LOCK_NAME
from skylite.run.status import ENDED
from skylite.run.status import is_alive as status_is_alive
from skylite.ui.dashboard import step_line
from skylite.ui.live_panel import RECENT_STEPS, CompletionView, LivePanel, ScreenState
from skylite.ui.logs import show

REFRESH_S = 0.25
LINES_REFRESH_S = 1.0
SILENT_S = 600.0
"""A run without a process here and without a write for this long has died, or runs elsewhere and hangs."""
SILENT_STEPS = 3
"""A live run is silent only after this many of its recent steps."""
KEYS_HELP = "←→ completion  ↑↓ step  b best  w worst  s as stored  n newest  q quit"
ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}
ESCAPE_WAIT_S = 0.05
"""The rest of an arrow's escape sequence arrives within this time."""
ORDERS: dict[str, Order] = {"b": "best", "w": "worst", "s": "stored"}


@dataclass(slots=True)
class Watcher:
    """Reads the run again when its files changed, and keeps what the person chose to see."""

    target: Path
    facts: RunFacts = field(init=False)
    alarms: list[Alarm] = field(init=False)
    step: int | None = None
    """The step whose completions are shown; None follows the newest."""
    order: Order = "stored"
    index: int = 0
    _seen: object = None
    _loaded: tuple[int, list[Completion]] | None = None

    def __post_init__(self) -> None:
        self.refresh()

    def refresh(self) -> bool:
        """Read the run if it changed. Raises ConfigError if it is no run (any more)."""
        signature = _signature(self.target)
        if signature == self._seen:
            return False
        self.facts = read_facts(self.target)
        self.alarms = find_alarms(self.facts.metrics, self.facts.held_out)
        self._seen = signature
        return True

    def state(self, *, has_keys: bool) -> ScreenState:
        """What to draw now."""
        facts = self.facts
        return ScreenState(
            facts.run.config.num_steps,
            name=facts.name,
            phase=facts.phase,
            detail=_detail(facts),
            stalled=stalled(facts),
            started=time.monotonic() - _elapsed(facts),
            history=facts.metrics,
            alarms=self.alarms,
            unreadable=facts.unreadable,
            held_out=facts.held_out,
            sample=self._completion(),
            footer=KEYS_HELP if has_keys else "",
        )

    def _completion(self) -> CompletionView | None:
        """The chosen one."""
        step, completions = self._completions()
        if not completions:
            return None
        self.index = min(self.index, len(completions) - 1)
        chosen = completions[self.index]
        order = "as stored" if self.order == "stored" else f"{self.order} first"
        return CompletionView(
            question=chosen.question,
            completion=chosen.text,
            reward=chosen.reward,
            answer=chosen.answer,
            place=f"step {step}, {order}: {self.index + 1} of {len(completions)}, {chosen.prompt_id}, "
            f"{chosen.tokens} tokens",
        )

    def press(self, key: str) -> bool:
        """Do what the key asks for; False for the key that quits."""
        if key in ("q", "Q", "\x04"):
            return False
        _, completions = self._completions()
        if key in ("left", "right") and completions:
            self.index = (self.index + (1 if key == "right" else -1)) % len(completions)
        elif key in ("up", "down"):
            self._turn(1 if key == "up" else -1)
        elif key in ORDERS:
            self.order, self.index = ORDERS[key], 0
        elif key == "n":
            self.step, self.index = None, 0
        return True

    def _turn(self, by: int) -> None:
        stored = list(self.facts.files.stored_rollouts())
        if stored:
            now = len(stored) - 1 if self.step not in stored else stored.index(self.step)
            self.step = stored[min(max(0, now + by), len(stored) - 1)]

    def _completions(self) -> tuple[int, list[Completion]]:
        """The chosen step and its completions; none if they are not stored or not readable."""
        stored = self.facts.files.stored_rollouts()
        step = self.step if self.step in stored else max(stored, default=0)
        if step not in stored:
            return step, []
        if self._loaded is None or self._loaded[0] != step:
            try:
                self._loaded = (step, read_training(stored[step], step))
            except SkyliteError:  # a live run may be deleting it; `samples` reports what is wrong
                self._loaded = (step, [])
        return step, Filter(order=self.order).apply(self._loaded[1])


def watch(
    target: RunOrNewest = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each step until the run ends.")
    ] = False,
) -> None:
    """Show the run until q or Ctrl-C; without a terminal, or as JSON, print its steps until it ends."""
    console = Console()
    watcher = Watcher(target or newest_run())
    try:
        if console.is_terminal and not as_json:
            _watch_screen(watcher, console)
        else:
            print_lines(watcher, json_lines if as_json else text_lines, show, time.sleep)
    except KeyboardInterrupt:
        pass


def _watch_screen(watcher: Watcher, console: Console) -> None:
    with (
        terminal_keys() as keys,
        Live(console=console, screen=True, auto_refresh=False, transient=True) as live,
    ):
        while True:
            watcher.refresh()
            panel = LivePanel(watcher.state(has_keys=keys is not None), fills_screen=True)
            live.update(panel, refresh=True)
            if not watcher.press(_next_key(keys)):
                return


def _next_key(keys: Keys | None) -> str:
    if keys is None:
        time.sleep(REFRESH_S)
        return ""
    return keys.read(REFRESH_S)


def print_lines(
    watcher: Watcher,
    lines_of: Callable[[Watcher], Iterator[str]],
    print_line: Callable[[str], None],
    sleep: Callable[[float], None],
) -> None:
    """Print each new line of `lines_of`, until the run ends or is silent."""
    shown: set[str] = set()
    while True:
        for line in lines_of(watcher):
            if line not in shown:
                shown.add(line)
                print_line(line)
        if has_ended(watcher.facts):
            return
        sleep(LINES_REFRESH_S)
        watcher.refresh()


def text_lines(watcher: Watcher) -> Iterator[str]:
    """A line for each held-out result, each step and each finding, and the end in words."""
    facts = watcher.facts
    for h in facts.held_out:
        yield f"held-out {h.score.name}, version {h.version}: {h.score}"
    for count in range(1, len(facts.metrics) + 1):
        yield step_line(facts.metrics[max(0, count - RECENT_STEPS) : count], facts.run.config.num_steps)
    for alarm in watcher.alarms:
        yield f"{'alarm' if alarm.is_alarm else 'warning'}: {alarm.text}"
    for text in facts.unreadable:
        yield f"not read: {text}"
    if has_ended(facts):
        yield f"{stalled(facts) or facts.phase}  {_detail(facts)}".strip()


def json_lines(watcher: Watcher) -> Iterator[str]:
    """The metrics of each step as JSON, and at the end a line without a step: phase, detail, findings."""
    facts = watcher.facts
    yield from map(metrics_line, facts.metrics)
    if has_ended(facts):
        alarms = [{"kind": a.kind, "text": a.text, "since": a.since} for a in watcher.alarms]
        end = {"phase": facts.phase, "detail": _detail(facts), "alarms": alarms}
        yield json.dumps({**end, "unreadable": list(facts.unreadable)}, ensure_ascii=False)


def has_ended(facts: RunFacts) -> bool:
    """Whether no further step comes: the run has ended or is silent."""
    return facts.phase in ENDED or is_silent(facts)


def is_silent(facts: RunFacts) -> bool:
    """Whether the run was killed here, or has no process here and has not written its status for a while."""
    return not is_alive(facts) and (was_killed(facts) or not silent_s(facts) <= SILENT_S)


def was_killed(facts: RunFacts) -> bool:
    """A killed run leaves its lock file, unlocked."""
    return not is_alive(facts) and (facts.run.path / LOCK_NAME).exists()


def is_alive(facts: RunFacts) -> bool:
    return facts.status is not None and status_is_alive(facts.run.path, facts.status)


def silent_s(facts: RunFacts) -> float:
    """Seconds since the run wrote its status; nan if its time is unreadable."""
    if facts.status is None:
        return time.time() - facts.files.config_path.stat().st_mtime
    return age_s(facts.status)


def stalled(facts: RunFacts) -> str:
    """Why no step is expected although the run has not ended; empty for one that works."""
    if facts.phase in ENDED:
        return ""
    seconds, is_long = silent_s(facts), is_silent(facts)
    if is_alive(facts):
        recent = facts.series("time/step_s")[-RECENT_STEPS:]
        is_long = seconds > max(SILENT_S, SILENT_STEPS * max(filter(math.isfinite, recent), default=0.0))
    elif facts.status is not None and facts.status.pids:
        return "dead" if is_long else "no process here"
    return f"silent for {age_text(seconds)}" if is_long else ""


def _detail(facts: RunFacts) -> str:
    status = facts.status
    if status is None:
        return "status.json is not readable"
    if status.phase in ENDED and status.error:
        return status.error
    if status.phase in ENDED:
        return f"{age_text(age_s(status))} ago"
    text = f"step {status.step} of {status.num_steps}"
    if stalled(facts):
        text += f", {status.phase}"
    if not is_alive(facts):
        text += f"; no such process on this machine, last write {age_text(age_s(status))} ago"
    return text


def _elapsed(facts: RunFacts) -> float:
    """Time of the recorded steps, and of a live run the time since the last one."""
    path = facts.files.metrics_path
    if facts.phase in ENDED or not is_alive(facts) or not path.exists():
        return facts.seconds
    return facts.seconds + max(0.0, time.time() - path.stat().st_mtime)


def _signature(target: Path) -> object:
    """Changes when a file changes that `read_facts` reads."""
    paths = [target / name for name in ("config.json", "status.json", "metrics.jsonl", "evals")]
    return [(p.stat().st_mtime_ns, p.stat().st_size) if p.exists() else None for p in paths]


class Keys:
    """Reads keys from a terminal in cbreak mode."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, timeout_s: float) -> str:
        """A character, an arrow's name, or "" if no key came in time. "q" at the end of the input."""
        if not self._waits(timeout_s):
            return ""
        key = os.read(self._descriptor, 1).decode("utf-8", errors="replace")
        if key != "\x1b":
            return key or "q"
        if not self._waits(ESCAPE_WAIT_S) or os.read(self._descriptor, 1) not in (b"[", b"O"):
            return ""
        return ARROWS.get(os.read(self._descriptor, 1).decode("ascii", errors="replace"), "")

    def _waits(self, timeout_s: float) -> bool:
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])


@contextmanager
def terminal_keys() -> Iterator[Keys | None]:
    """The keys of stdin; None if it is not a terminal. Restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
