"""reasoning-gym's scorers, for entries that were stored as JSON. They run in a sandbox (`make_scorer`)."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import sys
from collections import OrderedDict
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from skylite.errors import DataError
from skylite.optional_packages import install_command
from skylite.sandbox.sandbox import CallFailed, Limits, Sandbox, require_sandbox

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)
_TUPLE = "!tuple"
_PAIRS = "!pairs"
_DRAWING = ("matplotlib", "mpl_toolkits")
LIMITS = Limits(memory_bytes=1 << 30, cpu_s=10, wall_s=20.0, output_bytes=1024)
"""For scoring one answer."""
MOST_SANDBOXES = 4
"""Tasks whose process stays, because its start takes seconds. Each takes memory."""
_sandboxes: OrderedDict[str, Sandbox] = OrderedDict()
"""Task -> sandbox, the last used one last."""


def reasoning_gym(completion: str, *, task: str, entry: Any, answer: str = "") -> float:
    """The task's score for the text in the last <answer>...</answer>; 0.0 without one.

    Scorers can fail for an answer: they raise, take too long, or need too much memory. Such an answer scores
    0.0, but only if the scorer still gives the reference answer 1.0. Otherwise the completion is not to
    blame. Raises DataError then.
    """
    answers = _ANSWER.findall(completion)
    if not answers:
        return 0.0
    try:
        return _score(task, entry, answers[-1].strip())
    except CallFailed:
        pass
    try:
        reference = _score(task, entry, answer)
    except CallFailed as error:
        raise DataError(f"The scorer of the reasoning-gym task {task!r} {error}.") from None
    if reference != 1.0:
        raise DataError(
            f"The scorer of the reasoning-gym task {task!r} gives the reference answer {reference:g}."
        )
    return 0.0


def reasoning_gym_reward() -> Callable[..., float]:
    """The reward, if this machine has what it needs. Raises what `check_reasoning_gym` does."""
    check_reasoning_gym()
    return reasoning_gym


def check_reasoning_gym() -> None:
    """Raises DataError without reasoning-gym, and ConfigError if this machine cannot run it in a sandbox."""
    if importlib.util.find_spec("reasoning_gym") is None:
        raise DataError(
            "The package reasoning-gym is not installed.", f"Run `{install_command('reasoning-gym')}`."
        )
    require_sandbox("the reward reasoning-gym")


def close_sandboxes() -> None:
    """End the processes of all tasks. The next score starts one again."""
    while _sandboxes:
        _sandboxes.popitem()[1].close()


def _score(task: str, entry: Any, answer: str) -> float:
    value = _sandbox(task).call(entry, answer)
    if not isinstance(value, int | float):
        raise CallFailed(f"returned a {type(value).__name__} instead of a number")
    return float(value)


def _sandbox(task: str) -> Sandbox:
    if task not in _sandboxes:
        if len(_sandboxes) == MOST_SANDBOXES:
            _sandboxes.popitem(last=False)[1].close()
        _sandboxes[task] = Sandbox("skylite.rewards.reasoning_gym:make_scorer", task, limits=LIMITS)
    _sandboxes.move_to_end(task)
    return _sandboxes[task]


def to_json(value: Any) -> Any:
    """Convert to JSON, with tags for tuples and dicts with non-string keys, which some scorers need."""
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(v) for v in value]}
    if isinstance(value, list):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {k: to_json(v) for k, v in value.items()}
        return {_PAIRS: [[to_json(k), to_json(v)] for k, v in value.items()]}
    return value


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(v) for v in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(from_json(v) for v in value[_TUPLE])
        if value.keys() == {_PAIRS}:
            return {from_json(k): from_json(v) for k, v in value[_PAIRS]}
        return {k: from_json(v) for k, v in value.items()}
    return value


def make_scorer(task: str) -> Callable[[Any, str], float]:
    """In the sandbox: (entry as JSON, answer) -> score. Many scorers evaluate both as Python or SymPy."""
    sys.meta_path.insert(0, _NoDrawing())
    import reasoning_gym

    scorer: Callable[[str, Any], float] = reasoning_gym.get_score_answer_fn(task)
    with contextlib.suppress(Exception):
        # Fill caches, such as SymPy's, with an example of the package's own: each call starts from here.
        example = reasoning_gym.create_dataset(task, seed=0, size=1)[0]
        scorer(example["answer"], example)
    return lambda entry, answer: float(scorer(answer, from_json(entry)))


class _NoDrawing(MetaPathFinder, Loader):
    """Replaces matplotlib: reasoning-gym imports it, but no scorer draws.

    Its import takes seconds, and a folder to write in, which the sandbox does not have.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in _DRAWING else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


class _Absent(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        from unittest.mock import MagicMock

        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()
