"""The program's verbs, each loaded when it runs, and help texts in sections.

Without rich: importing it would double the time of `skylite --help`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any

import typer
from typer.core import TyperCommand, TyperGroup

from skylite.cli.options import Verbose

Row = tuple[str, str]
KEYWORD = inspect.Parameter.KEYWORD_ONLY
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
            if flag and self.name == "train" and _takes(ctx.parent.command.commands["prepare"], flag):
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
        commands: dict[str, Any] = {name: self.get_command(ctx, name) for name in self.list_commands(ctx)}
        width = formatter.width - 6 - max(map(len, commands))
        rows = [
            (command.rich_help_panel or "Commands", (name, command.get_short_help_str(width)))
            for name, command in commands.items()
        ]
        _write_sections(rows, last="Commands", formatter=formatter)


class Commands(typer.Typer):
    """A group of commands, such as those of `skylite adapters`."""

    def __init__(self, **settings: Any) -> None:
        usual: dict[str, Any] = {"cls": SectionedGroup, "no_args_is_help": True, "add_completion": False}
        super().__init__(rich_markup_mode=None, pretty_exceptions_enable=False, **usual | settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        register = super().command(name, cls=SectionedCommand, **settings)

        def add(function: Any) -> Any:
            register(with_fields(function))
            return function

        return add


def with_fields(function: Callable[..., None]) -> Callable[..., None]:
    """The function with -v and -q, and with each of its `Flags` as a flag of its own, if it takes some."""
    own = dict(inspect.signature(function, eval_str=True).parameters)
    kind = own.pop("flags").annotation if "flags" in own else None
    made = [] if kind is None else kind.parameters()
    names = [parameter.name for parameter in made]
    if "verbose" not in own:
        made.append(inspect.Parameter("verbose", KEYWORD, default=None, annotation=Verbose))

    @wraps(function)
    def called(**values: Any) -> None:
        taken = {name: values[name] for name in own}
        if kind is not None:
            taken["flags"] = kind(**{name: values[name] for name in names})
        function(**taken)

    parameters = [*(p.replace(kind=KEYWORD) for p in own.values()), *made]
    called.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    called.__annotations__ = {p.name: p.annotation for p in parameters}
    return called


class Verbs(Mapping[str, Any]):
    """Verb -> its command. Importing the files of all verbs would take seconds, so each waits for its use."""

    def __init__(self, headings: Mapping[str, Sequence[str]]) -> None:
        self.heading_of = {verb: heading for heading, verbs in headings.items() for verb in verbs}

    def __getitem__(self, verb: str) -> Any:
        """The command: the function, or the `Commands`, that has the verb's name in the verb's file."""
        if verb not in self.heading_of:
            raise KeyError(verb)
        entry = getattr(import_module(f"skylite.cli.{verb}"), verb)
        if not isinstance(entry, Commands):
            function, entry = entry, Commands()
            entry.command(verb, help=_docstring(verb))(function)
        command = typer.main.get_command(entry)
        command.name, command.help = verb, _docstring(verb)
        return command

    def __iter__(self) -> Iterator[str]:
        return iter(self.heading_of)

    def __len__(self) -> int:
        return len(self.heading_of)

    def outline(self, verb: str) -> TyperCommand:
        """What a list of commands shows, without importing the verb's file."""
        return TyperCommand(verb, help=_docstring(verb), rich_help_panel=self.heading_of[verb])


class Program(SectionedGroup):
    """`skylite`: the verbs under their headings. A list of them imports none of their files."""

    headings: Mapping[str, Sequence[str]]

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands: Any = Verbs(self.headings)

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # not its items, which would import every verb

    def get_command(self, ctx: Any, name: str) -> Any:
        return self.commands.outline(name) if name in self.commands.heading_of else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        verb, command, rest = super().resolve_command(ctx, args)
        return verb, command and self.commands[verb], rest


def _docstring(verb: str) -> str:
    """The docstring at the top of the verb's file, which is its help."""
    text = Path(__file__).with_name(f"{verb}.py").read_text(encoding="utf-8")
    return inspect.cleandoc(text.split('"""')[1])


def _number_expected(error: Any) -> str:
    """What is wrong with a flag's value that must be a number; empty for other errors of pydantic."""
    kinds = {"int_parsing": "a whole number", "int_from_float": "a whole number", "float_parsing": "a number"}
    for problem in error.errors() if hasattr(error, "errors") else ():
        if problem["type"] in kinds:
            return f"{problem['input']!r} is not {kinds[problem['type']]}."
    return ""


def _takes(command: Any, flag: str) -> bool:
    return any(flag in param.opts for param in command.params)


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
