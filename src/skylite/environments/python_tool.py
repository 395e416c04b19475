"""A tool for episodes: it runs the model's Python code in the sandbox (sandbox/sandbox.py).

tools = [python_tool()]
while (reply := await chat(messages, tools=tools)).tool_calls:
    messages += [reply.message, *reply.run_tools(tools)]
"""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Callable

from skylite.sandbox.sandbox import CallFailed, Limits, Sandbox

MAX_CHARACTERS = 4000
"""Longest output that the model gets to read."""
_NAME = "<code>"
_sandboxes: list[Sandbox] = []


def python_tool(limits: Limits | None = None) -> Callable[[str], str]:
    """A function `run_python(code)` for `chat(messages, tools=[...])` and `reply.run_tools([...])`.

    Each call gets a fresh process. It has no network, writes no file and starts no process.
    `limits` bound each call. The sandbox starts with the first call and ends with the episode.
    A call raises ConfigError if this machine cannot run a sandbox.
    """
    sandbox = Sandbox(f"{__name__}:make_runner", what="the tool run_python", limits=limits)
    _sandboxes.append(sandbox)

    def run_python(code: str) -> str:
        """Run a Python program and return what it prints. Each run is fresh and has no network."""
        try:
            output: str = sandbox.call(code)
        except CallFailed as error:
            return f"Error: the program {error}"
        return output

    return run_python


def close_sandboxes() -> None:
    """End the sandboxes of this process."""
    while _sandboxes:
        _sandboxes.pop().close()


def make_runner() -> Callable[[str], str]:
    """The function that the sandbox calls: code -> what it prints, and the error if it raised one."""
    return _run


def _run(code: str) -> str:
    output = io.StringIO()
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        try:
            exec(compile(code, _NAME, "exec"), {"__name__": "__main__"})  # in the sandbox only
        except SystemExit as error:
            if error.code is not None:
                print(f"exit: {error.code}")
        except MemoryError:
            raise
        except BaseException as error:  # noqa: BLE001  # the model reads it
            print(_error_of(error))
    text = output.getvalue()
    if len(text) > MAX_CHARACTERS:
        return f"{text[:MAX_CHARACTERS]}\n[{len(text) - MAX_CHARACTERS} more characters]"
    return text


def _error_of(error: BaseException) -> str:
    """The line of the model's code that raised, and the error."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == _NAME]
    where = "".join(f"line {frame.lineno}: " for frame in frames[-1:])
    return where + "".join(traceback.format_exception_only(error)).strip()
