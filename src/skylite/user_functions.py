"""Python files that the user names: data_prep files, and functions as FILE.py:function."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import inspect
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from skylite.errors import ConfigError, DataError, error_line
from skylite.untrusted_files import read_bytes
from skylite.untrusted_text import encodable

FEEDBACK = "feedback"
"""What a reward function or an episode calls a text among the named numbers that it returns."""


@dataclass(frozen=True, slots=True)
class FunctionKind:
    """What a FILE.py:function is for."""

    name: str
    setting: str
    """The setting that names it."""
    arguments: str
    returns: str
    takes_two: bool = True
    """Whether it is called with two arguments. Rewards are called by name (rewards/call_rewards.py)."""
    may_ask: tuple[str, ...] = ()
    """Further parameters that it may have, which get their values by name."""


REWARD = FunctionKind(
    "reward", "reward.functions", "(completion, *, prompt, answer, **columns)", "float", takes_two=False
)
ADVANTAGE = FunctionKind(
    "advantage", "algorithm.advantage", "(rewards, lengths)", "Tensor", may_ask=("components",)
)
EPISODE = FunctionKind("episode", "env.episode", "(task, chat)", "float")
LAUNCHER = FunctionKind("launcher", "engine.launcher", "()", "Launcher", takes_two=False)
POLICY_LOSS = FunctionKind("policy loss", "algorithm.policy_loss", "(inputs, config)", "Tensor")


def split_feedback(returned: Mapping[Any, Any]) -> tuple[dict[Any, Any], str]:
    """What a function returned, without its feedback, and that; empty if it is blank. Raises ValueError."""
    text = returned.get(FEEDBACK, "")
    if not isinstance(text, str):
        raise ValueError(f"returned {text!r:.200} as {FEEDBACK!r}, which must be a text")
    return {name: value for name, value in returned.items() if name != FEEDBACK}, encodable(
        text if text.strip() else ""
    )


def is_program(spec: str) -> bool:
    """Whether a spec is FILE.py:function. Only such a spec can make skylite run a file."""
    file, _, function = spec.rpartition(":")
    return not is_named_as_text(spec) and file.endswith(".py") and bool(function)


COMMAND = "command:"
"""Prefix of an env.episode that is a command line."""
VERIFIERS = "verifiers:"
"""Prefix of an env.episode that is an environment of the package verifiers."""


def is_command(spec: str) -> bool:
    """Whether a spec is command:PROGRAM ARGUMENTS."""
    return spec.startswith(COMMAND)


def is_verifiers(spec: str) -> bool:
    """Whether a spec is verifiers:NAME KEY=VALUE ..."""
    return spec.startswith(VERIFIERS)


def is_named_as_text(spec: str) -> bool:
    """Whether a spec can run more than one file. The user must name exactly this text."""
    return is_command(spec) or is_verifiers(spec)


CODE_IN_DATA = ("reasoning-gym",)
"""Rewards and episodes that evaluate fields of the data and completions as code, in a sandbox."""


def resolve_spec(spec: str) -> str:
    """FILE.py:function with an absolute path, valid in every folder. Other specs stay as they are."""
    if not is_program(spec):
        return spec
    file, _, function = spec.rpartition(":")
    try:
        return f"{os.path.realpath(file)}:{function}"
    except ValueError:  # a path that no file can have, such as one with a NUL
        return spec


def program_sha256(spec: str) -> str | None:
    """sha256 of the file that the spec names; None if it cannot be read."""
    path = Path(spec.rpartition(":")[0])
    try:
        return hashlib.sha256(read_bytes(path)).hexdigest() if path.is_file() else None
    except (OSError, ValueError):
        return None


def load_function(spec: str, kind: FunctionKind, sha256: str | None = None) -> Callable[..., Any]:
    """Run the file and return its function.

    Raises ConfigError if that fails, the function does not take the two arguments of its kind, or the file's
    content does not have the `sha256` (None: any content).
    """
    path, name = _find_file(spec, kind)
    try:
        module = import_file(path, f"{kind.name} file", sha256)
    except DataError as error:
        raise ConfigError(error.what, error.hint) from error
    try:
        with user_code():
            function: Callable[..., Any] | None = getattr(module, name, None)
            problem = _call_problem(function, kind) if kind.takes_two else ""
    except UserCodeFailed as error:
        raise ConfigError(f"{name} in {path} cannot be used: {error}.", "Fix that file.") from error
    if not callable(function):
        raise _no_function(path, name, kind)
    if problem:
        raise _wrong_arguments(path, name, kind, problem)
    return function


def _call_problem(function: Callable[..., Any] | None, kind: FunctionKind) -> str:
    """Why the function cannot be called with two arguments; "" if it can, or is no function."""
    try:
        if callable(function):
            signature = inspect.signature(function)
            signature.bind(None, None, **{n: None for n in kind.may_ask if n in signature.parameters})
    except (TypeError, ValueError) as error:
        return str(error)
    return ""


def check_function(spec: str, kind: FunctionKind) -> None:
    """Check FILE.py:function without running the file, which may import torch. Raises ConfigError.

    `load_function` checks its arguments.
    """
    path, name = _find_file(spec, kind)
    try:
        tree = ast.parse(read_bytes(path))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f"The {kind.name} file {path} cannot be imported: {error_line(error)}.",
            "Fix that file.",
        ) from None
    if not any(_binds(node, name) for node in ast.walk(tree)):
        raise _no_function(path, name, kind)


def import_file(path: Path, what: str, sha256: str | None = None) -> ModuleType:
    """Run a Python file as a separate module. Raises DataError with the exception that the file raised.

    It runs the very bytes that were compared with `sha256` (None: not compared), and never a compiled file
    beside it.
    """
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None:
        raise DataError(f"The {what} {path} is not a Python file.")
    module = importlib.util.module_from_spec(spec)
    try:
        source = read_bytes(path)
    except OSError as error:
        raise DataError(f"The {what} {path} cannot be imported: {error_line(error)}.") from None
    if sha256 is not None and hashlib.sha256(source).hexdigest() != sha256:
        raise DataError(f"The {what} {path} has changed since skylite checked it.", "Start again.")
    try:
        with user_code():
            exec(compile(source, path, "exec", dont_inherit=True), module.__dict__)
    except UserCodeFailed as error:
        raise DataError(
            f"The {what} {path} cannot be imported: {error}.", _import_remedy(path, error.__cause__)
        ) from error
    return module


def _import_remedy(path: Path, cause: BaseException | None) -> str:
    """What to do about a file that raised; it may not import a module beside it, which nobody checks."""
    name = (cause.name or "").partition(".")[0] if isinstance(cause, ModuleNotFoundError) else ""
    if name and ((path.parent / f"{name}.py").is_file() or (path.parent / name).is_dir()):
        return (
            f"The file must stand alone: skylite checks its content, not that of {name} beside it. Move what "
            f"it needs into it, install {name} as a package, or add its folder to sys.path in the file."
        )
    return "Fix that file."


class UserCodeFailed(Exception):
    """A user's code raised. The text names class and message; `__cause__` is what was raised."""


class ProcessExit(BaseException):
    """A user's code would end skylite without an error, by os._exit."""


_real_exit = os._exit
_ran_in = 0
"""The process that has run a user's code."""
_running = threading.local()
"""`pid`: this process while the thread runs a user's code, else None."""


def _exit(code: int) -> NoReturn:
    """Replaces os._exit. A process that the user's code forks still ends.

    The user's code may have started threads; skylite's threads never call this.
    """
    is_users_thread = threading.current_thread() is not threading.main_thread() and _ran_in == os.getpid()
    if is_users_thread or getattr(_running, "pid", None) == os.getpid():
        raise ProcessExit(f"os._exit({code!r})")
    _real_exit(code)


@contextmanager
def user_code(keep: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """Turn whatever the user's code in the block raises into UserCodeFailed, except `keep`.

    This includes SystemExit, KeyboardInterrupt, CancelledError and a call of os._exit, which would end the
    run as if nothing was wrong. A Ctrl-C that the user really presses stays a KeyboardInterrupt.
    """
    pressed, outer = False, getattr(_running, "pid", None)

    def on_ctrl_c(*_: object) -> None:
        nonlocal pressed
        pressed = True
        raise KeyboardInterrupt

    is_main = threading.current_thread() is threading.main_thread()
    hears_ctrl_c = is_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if hears_ctrl_c:
        signal.signal(signal.SIGINT, on_ctrl_c)
    global _ran_in
    os._exit = _exit  # type: ignore[assignment]  # typeshed has another parameter name
    _ran_in = _running.pid = os.getpid()
    try:
        yield
    except BaseException as error:
        if isinstance(error, keep) or (pressed and isinstance(error, KeyboardInterrupt)):
            raise
        raise UserCodeFailed(error_line(error)) from error
    finally:
        _running.pid = outer
        if hears_ctrl_c:
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _find_file(spec: str, kind: FunctionKind) -> tuple[Path, str]:
    """The file, which exists, and the function's name."""
    file, _, name = spec.rpartition(":")
    if not Path(file).is_file():
        raise ConfigError(
            f"The {kind.name} file {file} does not exist.", "Give FILE.py:function with a path from here."
        )
    return Path(file), name


def _binds(node: ast.AST, name: str) -> bool:
    """Whether a statement may give `name` a value."""
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return node.name == name
        case ast.Name():
            return node.id == name and isinstance(node.ctx, ast.Store)
        case ast.alias():
            return (node.asname or node.name) in (name, "*")
    return False


def _no_function(path: Path, name: str, kind: FunctionKind) -> ConfigError:
    return ConfigError(f"{path} has no function {name!r}.", _definition(name, kind))


def _wrong_arguments(path: Path, name: str, kind: FunctionKind, reason: str) -> ConfigError:
    return ConfigError(
        f"{name} in {path} cannot be called with {kind.arguments}: {reason}.", _definition(name, kind)
    )


def _definition(name: str, kind: FunctionKind) -> str:
    return f"Define it: def {name}{kind.arguments} -> {kind.returns}."
