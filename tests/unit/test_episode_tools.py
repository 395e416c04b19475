"""Tools of episodes: a function becomes one, with its schema, and its result goes back to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skylite.environments.chat import tool_schema
from tests.unit.environment_cases import ScriptedEngine, sample


def test_functions_become_tools_and_run(tmp_path: Path) -> None:
    source = """
    def add(a: int, b: int = 1) -> int:
        "Add two numbers."
        return a + b

    async def episode(task, chat):
        reply = await chat(task.messages, tools=[add])
        results = reply.run_tools([add])
        last = await chat([*task.messages, reply.message, *results], tools=[add])
        return float(last.text)
    """

    def script(prompt: str) -> str:
        if "tool\n" in prompt:
            return prompt.split("tool\n")[1].split("<|im_end|>")[0]
        return 'Thinking. <tool_call>\n{"name": "add", "arguments": {"a": 41}}\n</tool_call>'

    (group,) = sample(tmp_path, source, ScriptedEngine(script), max_completion_tokens=200)
    assert group.trajectories[0].reward == 42.0
    first, second = group.trajectories[0].calls
    known = first.prompt_token_ids + first.completion_token_ids
    assert second.prompt_token_ids[: len(known)] == known


def test_the_schema_of_a_function() -> None:
    def look_up(name: str, limit: int = 3) -> str:
        """Find a name."""
        return name * limit

    function: Any = tool_schema(look_up)["function"]
    assert (function["name"], function["description"]) == ("look_up", "Find a name.")
    assert function["parameters"]["required"] == ["name"]
    assert function["parameters"]["properties"]["limit"]["default"] == 3
