"""The tool that runs a model's Python code in the sandbox."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skylite.environments import python_tool as module
from skylite.environments.chat import Reply
from skylite.environments.python_tool import MAX_CHARACTERS, python_tool
from skylite.errors import ConfigError
from skylite.sandbox.sandbox import Limits
from tests.unit.environment_cases import ScriptedEngine, sample

EPISODE = """
    from skylite.environments.python_tool import python_tool

    async def episode(task, chat):
        messages, tools = list(task.messages), [python_tool()]
        while (reply := await chat(messages, tools=tools)).tool_calls:
            messages += [reply.message, *reply.run_tools(tools)]
        return float(reply.text == "42")
"""
CALL = '<tool_call>\n{"name": "run_python", "arguments": {"code": "print(6 * 7)"}}\n</tool_call>'


@pytest.fixture(scope="module")
def run_python() -> Callable[[str], str]:
    return python_tool(Limits(wall_s=5.0, cpu_s=1))


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("print(6 * 7)", "42\n"),
        ("import sys; print('bad', file=sys.stderr)", "bad\n"),
        ("x = 1\nprint(x)\n1 / 0", "1\nline 3: ZeroDivisionError: division by zero\n"),
        ("def f(:", "SyntaxError"),
        ("print('so far'); raise SystemExit(3)", "so far\nexit: 3\n"),
        ("open('note', 'w')", "PermissionError"),
        ("import tempfile; tempfile.mkdtemp()", "FileNotFoundError"),
        (f"print('a' * {MAX_CHARACTERS + 5})", "[6 more characters]"),
        ("import socket; socket.socket()", "PermissionError"),
        ("import os; os.fork()", "PermissionError"),
        ("import subprocess; subprocess.run(['true'])", "PermissionError"),
        ("while True: pass", "Error: the program "),
        ("import time; time.sleep(60)", "Error: the program took longer than 5 s"),
        ("import os; os._exit(5)", "Error: the program"),
    ],
)
def test_the_model_reads_what_its_program_printed(
    run_python: Callable[[str], str], code: str, output: str
) -> None:
    found = run_python(code)
    assert output in found if output[-1] != "\n" else found == output


def test_an_episode_offers_the_tool_and_the_model_reads_its_result(tmp_path: Path) -> None:
    def reply_to(prompt: str) -> str:
        return prompt.split("tool\n")[1].split("\n")[0] if "tool\n" in prompt else CALL

    (group,) = sample(tmp_path, EPISODE, ScriptedEngine(reply_to), max_completion_tokens=200)
    (trajectory,) = group.trajectories
    assert trajectory.reward == 1.0
    assert [s.observed for s in trajectory.calls] == ["user: question 0", "tool: 42\n"]


def test_a_machine_without_a_sandbox_is_no_answer_for_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoSandbox:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def call(self, code: str) -> str:
            raise ConfigError("This machine cannot run the tool run_python in a sandbox.")

    monkeypatch.setattr(module, "Sandbox", NoSandbox)
    call = {"id": "1", "function": {"name": "run_python", "arguments": '{"code": "1"}'}}
    with pytest.raises(ConfigError, match="sandbox"):
        Reply({"content": "", "tool_calls": [call]}, "tool_calls").run_tools([python_tool()])
