"""Flags of commands, made from declarations: those of settings in config/, and of `Flags` classes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Collection, Iterator
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer
from annotated_types import Ge
from pydantic import BaseModel, ConfigDict
from pydantic.fields import FieldInfo

from skylite.cli.help import KEYWORD, with_fields
from skylite.config.base_section import HEADINGS, MORE, Flag
from skylite.config.provenance import Typed, from_command_line, parse_value
from skylite.config.train import all_settings
from skylite.errors import ConfigError

Command = Callable[..., None]


class Flags(BaseModel):
    """The flags of a command, which takes them as `flags`: each field is one, its docstring the help."""

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        arbitrary_types_allowed=True,
        defer_build=True,
    )

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """What typer parses."""
        return [_own_parameter(name, field) for name, field in cls.model_fields.items()]


def _own_parameter(name: str, field: FieldInfo) -> inspect.Parameter:
    """Of a `Flag`, or as typer's own objects declare it."""
    metadata, default = field.metadata, inspect.Parameter.empty if field.is_required() else field.default
    if flag := next((part for part in metadata if isinstance(part, Flag)), None):
        least: Any = next((part.ge for part in metadata if isinstance(part, Ge)), None)
        option = typer.Option(
            flag.name,
            help=" ".join((field.description or "").split()),
            min=least,
            metavar=flag.metavar,
            show_default=flag.default or True,
            rich_help_panel=flag.heading,
        )
        metadata = [option]
    annotation = Annotated[field.annotation, *metadata] if metadata else field.annotation
    return inspect.Parameter(name, KEYWORD, default=default, annotation=annotation)


def takes_settings(names: Collection[str] | Literal["all"], *, of: str = "") -> Callable[[Command], Command]:
    """Give a command the flags of settings, and `--set`. It gets what the user typed as `provenance`.

    Args:
        names: settings, such as env.episode.
        of: what gives a setting that is not typed, "recipe" or "run". Empty: nothing but its default.
    """
    chosen = {name: (field, flag) for name, field, flag in flags() if names == "all" or name in names}

    def decorate(command: Command) -> Command:
        command = with_fields(command)

        @wraps(command)
        def parsed(*, set_: list[str] | None = None, **values: Any) -> None:
            typed: dict[str, Typed] = {}
            for name, (field, flag) in chosen.items():
                value = values.pop(_identifier(flag), None)
                if value is not None and value != []:
                    typed |= _typed(name, field, flag, value)
            command(provenance=from_command_line(set_ or (), typed), **values)

        own = [p for p in inspect.signature(command).parameters.values() if p.name != "provenance"]
        made = [_parameter(name, field, flag, of) for name, (field, flag) in chosen.items()]
        parameters = sorted([*own, *made, _set_parameter(of)], key=_place)
        parsed.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        parsed.__annotations__ = {p.name: p.annotation for p in parameters}
        return parsed

    return decorate


def flags() -> Iterator[tuple[str, FieldInfo, Flag]]:
    """Name, declaration and flag of every setting that has one."""
    for name, field in all_settings():
        for flag in field.metadata:
            if isinstance(flag, Flag):
                yield name, field, flag


def _parameter(name: str, field: FieldInfo, flag: Flag, of: str) -> inspect.Parameter:
    kind, extra = _kind(field, flag), ""
    if kind is list:
        kind, extra = list[str], " Repeatable."
    elif _is_choice_of_several(field):
        extra = " Separate several by commas."
    default = flag.default or _as_typed(field.default)
    option = typer.Option(
        flag.name,
        help=_first_sentence(field.description or "") + extra,
        show_default=f"the {of}'s, else {default}" if of else default,
        rich_help_panel=flag.heading,
        metavar="NAME=VALUE" if get_origin(field.annotation) is dict else None,
    )
    return _optional(_identifier(flag), kind, option)


def _set_parameter(of: str) -> inspect.Parameter:
    otherwise = f"the values of the {of}" if of else "each setting's own"
    option = typer.Option(
        "--set",
        metavar="A.B=VALUE",
        help=f"Any other setting, in TOML syntax. Repeatable. Default: {otherwise}.",
        rich_help_panel=MORE,
    )
    return _optional("set_", list[str], option)


def _optional(name: str, kind: Any, option: Any) -> inspect.Parameter:
    return inspect.Parameter(name, KEYWORD, default=None, annotation=Annotated[kind | None, option])


def _kind(field: FieldInfo, flag: Flag) -> Any:
    """What typer parses: int, float, str, Path, or list for a flag that repeats."""
    kind = next((part for part in get_args(field.annotation) if part in (int, float, str)), field.annotation)
    if get_origin(field.annotation) in (list, dict):
        return str if _is_choice_of_several(field) else list
    return Path if flag.is_path else kind


def _is_choice_of_several(field: FieldInfo) -> bool:
    """Whether it is a list of some names, such as log.to."""
    return get_origin(field.annotation) is list and get_origin(get_args(field.annotation)[0]) is Literal


def _typed(name: str, field: FieldInfo, flag: Flag, value: Any) -> dict[str, Typed]:
    """Settings and values of a flag that was typed."""
    if _is_choice_of_several(field):
        value = [word.strip() for word in value.split(",") if word.strip()]
    if get_origin(field.annotation) is not dict:
        return {name: Typed(str(value) if isinstance(value, Path) else value, flag.name)}
    typed = {}
    for text in value:
        key, equals, word = text.partition("=")
        if not equals:
            raise ConfigError(f"{flag.name} {text} sets nothing.", "Give NAME=VALUE.")
        typed[f"{name}.{key.strip()}"] = Typed(parse_value(word.strip()), flag.name)
    return typed


def _identifier(flag: Flag) -> str:
    return flag.name.removeprefix("--").replace("-", "_")


def _first_sentence(text: str) -> str:
    text = " ".join(text.split())
    end = re.search(r"(?<!e\.g)\.(?= |$)", text)
    return text[: end.end()] if end else text


def _as_typed(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _place(parameter: inspect.Parameter) -> int:
    """Sorts parameters by the headings of their flags; arguments and other headings come first."""
    heading = getattr(get_args(parameter.annotation)[1], "rich_help_panel", None)
    return HEADINGS.index(heading) if heading in HEADINGS else -1
