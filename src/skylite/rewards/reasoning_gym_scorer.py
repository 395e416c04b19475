"""A scorer of reasoning-gym, as the sandbox runs it (rewards/reasoning_gym.py)."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from skylite.rewards.reasoning_gym import from_json

_DRAWING = ("matplotlib", "mpl_toolkits")


def make_scorer(task: str) -> Callable[[Any, str], float]:
    """(entry as JSON, answer) -> score. Many scorers evaluate both as Python or SymPy expressions."""
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
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()
