"""What the parameters of a reward function ask for. Everything is passed by name.

A function with `completions` or `prompts` takes a batch: lists with one element for each completion. Any
other function takes one completion.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ForwardRef, get_args, get_origin

from skylite.types import Prompt

Item = tuple[Prompt, str]
"""A prompt and the text of one completion."""
BATCH_NAMES = {"prompt": "prompts", "completion": "completions"}
"""Names that differ in a batch; every other name stays, and its value becomes a list."""
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of verl's compute_score, for functions that name them."""

ANSWER_NAMES = ("answer", "ground_truth")
"""Names of the reference answer: skylite's and verl's."""


class SignatureProblem(Exception):
    """Why a function cannot be called. The text continues "it cannot be called: "."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments that a reward function takes."""

    named: frozenset[str]
    required: frozenset[str]
    takes_rest: bool
    """Whether it has **columns, which gets what the function does not name."""
    is_batch: bool
    wants_messages: bool
    """Whether a completion is passed as chat messages, as TRL does for chat data, instead of text."""

    @property
    def asks_for_answer(self) -> bool:
        """Whether the function names the reference answer."""
        return bool(self.named & set(ANSWER_NAMES))

    def arguments(self, prompt: Prompt, completion: str) -> dict[str, Any]:
        """The arguments of a call for one completion. Raises SignatureProblem if the data lacks a column."""
        values = _values(prompt, completion, self.wants_messages)
        if self.is_batch:
            values = {BATCH_NAMES.get(name, name): value for name, value in values.items()}
        missing = sorted(self.required - values.keys())
        if missing:
            available = sorted(values.keys() - set(VERL_NAMES))
            raise SignatureProblem(
                f"it asks for {' and '.join(missing)}, but prompt {prompt.id} has only {', '.join(available)}"
            )
        unnamed = values.keys() - set(VERL_NAMES) if self.takes_rest else set()
        return {name: value for name, value in values.items() if name in self.named | unnamed}

    def batch_arguments(self, items: Sequence[Item]) -> dict[str, list[Any]]:
        """The arguments of a call for a batch: lists, with None where a row lacks an optional column.

        Raises SignatureProblem if a row lacks a column that the function requires.
        """
        rows = [self.arguments(prompt, completion) for prompt, completion in items]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}


def read_signature(function: Callable[..., Any]) -> Signature:
    """Read what a reward function takes. Raises SignatureProblem, and whatever its annotations raise."""
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise SignatureProblem(f"{p.name} is positional-only, and arguments are passed by name")
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = frozenset(p.name for p in by_name)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    batch, single = named & set(BATCH_NAMES.values()), named & {*BATCH_NAMES, "solution_str"}
    if batch and single:
        raise SignatureProblem(
            f"{', '.join(sorted(batch))} is for a batch and {', '.join(sorted(single))} for one completion"
        )
    completion = {"completions"} if batch else {"completion", "solution_str"}
    if not named & completion and not takes_rest:
        raise SignatureProblem(f"it takes ({', '.join(p.name for p in parameters)}) and no completion")
    return Signature(
        named=named,
        required=frozenset(p.name for p in by_name if p.default is p.empty),
        takes_rest=takes_rest,
        is_batch=bool(batch),
        wants_messages=any(_is_annotated_as_messages(function, name) for name in named & completion),
    )


def _values(prompt: Prompt, completion: str, wants_messages: bool) -> dict[str, Any]:
    """Everything a function can ask for. Copies: a function may change what it gets."""
    extra = copy.deepcopy(prompt.extra)
    said = [{"role": "assistant", "content": completion}] if wants_messages else completion
    answer = dict.fromkeys(ANSWER_NAMES, prompt.answer) if prompt.answer else {}
    return {
        "id": prompt.id,
        "source": prompt.source,
        "difficulty": prompt.difficulty,
        "data_source": prompt.source,
        "extra_info": extra,
        "solution_str": completion,
        **extra,
        **answer,
        "prompt": [dict(message) for message in prompt.messages],
        "completion": said,
    }


def _is_annotated_as_messages(function: Callable[..., Any], name: str) -> bool:
    """Whether the parameter's annotation holds a dict, as `list[dict[str, str]]` does."""
    if inspect.signature(function).parameters[name].annotation is inspect.Parameter.empty:
        return False
    try:
        annotation = inspect.signature(function, eval_str=True).parameters[name].annotation
    except Exception as error:
        raise SignatureProblem(f"its annotations cannot be evaluated ({error})") from error
    return _holds_mapping(annotation)


def _holds_mapping(annotation: Any) -> bool:
    if isinstance(annotation, str | ForwardRef):
        raise SignatureProblem(f"the annotation {annotation!r} is quoted inside another annotation")
    kind = get_origin(annotation) or annotation
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return True
    return any(_holds_mapping(part) for part in get_args(annotation))
