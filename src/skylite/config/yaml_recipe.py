"""YAML for recipes: plain values only, bounded in size and depth, read as YAML 1.2 reads them."""

from __future__ import annotations

import re
from typing import Any

import yaml

MAX_CHARACTERS = 100_000
MAX_DEPTH = 20
_RESOLVERS = (
    ("tag:yaml.org,2002:bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("tag:yaml.org,2002:null", r"~|null|Null|NULL|none|", ["~", "n", "N", ""]),
    ("tag:yaml.org,2002:int", r"[-+]?[0-9]+", "-+0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?", "-+.0123456789"),
    ("tag:yaml.org,2002:float", r"[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
)
"""YAML 1.2's core schema, with `none` for null as in `--set`. PyYAML follows YAML 1.1, which reads 1e-4 as
text, `off` as false and 1:30 as 90."""


class RecipeError(ValueError):
    """The text is not YAML that a recipe may hold."""


class _Loader(yaml.SafeLoader):  # type: ignore[misc]  # yaml has no types
    """Builds text, numbers, true, false, null, lists and mappings, and no other object."""

    yaml_implicit_resolvers: dict[str, Any] = {}

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.depth = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        event = self.peek_event()
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            raise _problem("it has an anchor (&) or alias (*); write the value out", event)
        if getattr(event, "tag", None) is not None:
            raise _problem(f"it has the tag {event.tag}; write plain values", event)
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise _problem(f"it is nested more than {MAX_DEPTH} levels deep", event)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node

    def construct_yaml_int(self, node: Any) -> int:
        return int(self.construct_scalar(node))  # PyYAML would read 010 as 8

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        found: dict[Any, Any] = {}
        for key_node, value_node in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str):
                raise _problem(f"the key {key!r} is not text", key_node)
            if key in found:
                raise _problem(f"{key} appears twice", key_node)
            found[key] = self.construct_object(value_node, deep=deep)
        return found


_Loader.add_constructor("tag:yaml.org,2002:int", _Loader.construct_yaml_int)
for tag, pattern, first in _RESOLVERS:
    _Loader.add_implicit_resolver(tag, re.compile(f"^(?:{pattern})$"), list(first))


def parse_yaml(text: str) -> dict[str, Any]:
    """The mapping in a YAML document; {} for an empty one. Raises RecipeError with the place."""
    if len(text) > MAX_CHARACTERS:
        raise RecipeError(f"it has {len(text)} characters, and at most {MAX_CHARACTERS} are read")
    try:
        tree = yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        raise RecipeError(_words(error)) from None
    except yaml.YAMLError as error:  # a character that YAML does not allow
        raise RecipeError(str(error).splitlines()[0]) from None
    except RecursionError:
        raise RecipeError("it is nested too deeply") from None
    except ValueError:
        raise RecipeError("it has an integer of thousands of digits") from None
    if tree is not None and not isinstance(tree, dict):
        raise RecipeError(f"it holds a {type(tree).__name__}, not settings like `num_steps: 20`")
    return tree or {}


def _problem(text: str, place: Any) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=text, problem_mark=place.start_mark)


def _words(error: yaml.MarkedYAMLError) -> str:
    """PyYAML's reason in one line, in the form of tomllib's."""
    mark = error.problem_mark or error.context_mark
    place = f" (at line {mark.line + 1}, column {mark.column + 1})" if mark is not None else ""
    parts = [part for part in (error.context, error.problem) if part]
    return " ".join((": ".join(parts) or "it cannot be parsed").split()) + place
