"""Help texts in sections, without rich: importing it would double the time of `skylite --help`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

Row = tuple[str, str]
_TYPE = re.compile(r"<(?:list\[)?(\w+)(?:\]| range)?>")
"""Such as `<list[Path]>` and `<int range>`, shown as `<path>` and `<int>`."""


class SectionedCommand(TyperCommand):
    """Lists the options under the headings of their `rich_help_panel`; those without come last.

    A flag that can only be turned on shows that it is off.
    """

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Names what is expected instead of no number, and the command of a flag that `train` lacks."""
        try:
            return super().parse_args(ctx, args)
        except typer.BadParameter as error:
            error.message = _number_expected(error.__cause__) or error.message
            raise
        except Exception as error:
            flag = getattr(error, "option_name", None)  # typer does not export NoSuchOption
            commands = getattr(ctx.parent.command, "commands", {}) if ctx.parent is not None else {}
            prepare = commands.get("prepare")
            if self.name == "train" and prepare and any(flag in p.opts for p in prepare.params):
                raise typer.BadParameter(
                    f"{flag} is no flag of `skylite train`: it becomes part of the data. "
                    f"Give it to `skylite prepare`."
                ) from error
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        arguments, options = [], []
        for param in self.get_params(ctx):
            if (row := param.get_help_record(ctx)) is None:
                continue
            if param.param_type_name == "argument":
                arguments.append(("Arguments", _with_plain_type(row)))
            else:
                heading = getattr(param, "rich_help_panel", None) or "Options"
                options.append((heading, _with_plain_type(_with_default(param, row))))
        _write_sections([*arguments, *options], last="Options", formatter=formatter)


ELSEWHERE = {
    "merge": "export RUN --merge",
    "resume": "train --resume RUN",
    "evaluate": "eval RUN",
    "list": "runs",
}
"""Commands that people look for -> where they are."""


class SectionedGroup(TyperGroup):
    """Lists the commands under the headings of their `rich_help_panel`."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args and args[0] in ELSEWHERE and args[0] not in self.commands and ctx.parent is None:
            ctx.fail(f"No such command {args[0]!r}. Use `skylite {ELSEWHERE[args[0]]}`.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = {name: self.commands[name] for name in self.list_commands(ctx)}
        width = formatter.width - 6 - max(map(len, commands))
        rows = [
            (getattr(command, "rich_help_panel", "") or "Commands", (name, command.get_short_help_str(width)))
            for name, command in commands.items()
        ]
        _write_sections(rows, last="Commands", formatter=formatter)


class Commands(typer.Typer):
    """The commands of one subject. `skylite --help` lists them under `heading`."""

    def __init__(self, heading: str, **settings: Any) -> None:
        super().__init__(rich_markup_mode=None, cls=SectionedGroup, **settings)
        self.heading = heading

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=SectionedCommand, rich_help_panel=self.heading, **settings)


def _number_expected(error: Any) -> str:
    """What is wrong with a flag's value that must be a number; empty for other errors of pydantic."""
    kinds = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}
    for problem in error.errors() if hasattr(error, "errors") else ():
        if problem["type"] in kinds:
            return f"{problem['input']!r} is not {kinds[problem['type']]}."
    return ""


def _with_default(param: Any, row: Row) -> Row:
    """The row with `[default: off]` if it is a flag with the value False."""
    names, text = row
    is_off = param.is_flag and not param.is_eager and param.default is False
    return (names, f"{text}  [default: off]") if is_off else row


def _with_plain_type(row: Row) -> Row:
    return _TYPE.sub(lambda found: f"<{found[1].lower()}>", row[0]), row[1]


def _write_sections(rows: Iterable[tuple[str, Row]], *, last: str, formatter: Any) -> None:
    sections: dict[str, list[Row]] = {}
    for heading, row in rows:
        sections.setdefault(heading, []).append(row)
    for heading in sorted(sections, key=lambda h: h == last):  # a stable sort: the others keep their order
        with formatter.section(heading):
            formatter.write_dl(sections[heading])
