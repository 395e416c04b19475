"""Half a character (a lone surrogate) in what a model or a user's code writes ends no run."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.environments.chat_request import parse_request
from skylite.errors import DataError, RunFailed
from skylite.rewards.worker_pool import RewardPool
from skylite.sandbox.sandbox import Sandbox
from skylite.untrusted_text import encodable, encodable_json
from tests.unit.environment_cases import ScriptedEngine, make_prompt, sample

HALF = "\ud800"
ANY_TEXT = st.text(st.one_of(st.characters(), st.sampled_from("\ud800\udbff\udc00\udfff")))


@given(ANY_TEXT)
def test_any_text_becomes_encodable_and_good_text_stays(text: str) -> None:
    safe = encodable(text)
    safe.encode()
    try:
        text.encode()
    except UnicodeEncodeError:
        assert "\ud83d\ude00" not in text or "\U0001f600" in safe
    else:
        assert safe is text


def test_two_halves_become_their_character() -> None:
    assert encodable("a\ud83d\ude00b") == "a\U0001f600b"
    assert encodable("a\ud83d") == "a\ufffd"
    assert encodable("\ude00b") == "\ufffdb"
    assert encodable_json({HALF: [HALF, 1.5, None, "é"]}) == {"\ufffd": ["\ufffd", 1.5, None, "é"]}


TOOL = """
    from skylite.environments.python_tool import python_tool

    async def episode(task, chat):
        messages, tools = list(task.messages), [python_tool()]
        while (reply := await chat(messages, tools=tools)).tool_calls:
            messages += [reply.message, *reply.run_tools(tools)]
        return float(reply.text == "done")
"""
PRINT = """
    def episode(task, chat):
        print(chr(0xd800), flush=True)
        chat([{"role": "user", "content": "a" + chr(0xd800)}])
        return {"named " + chr(0xd800): 1.0}
"""
RAISE = """
    async def episode(task, chat):
        await chat(task.messages)
        raise ValueError("bad " + chr(0xd800))
"""
COMMAND = r"""
import json, os, urllib.request
body = b'{"messages": [{"role": "user", "content": "\\ud800"}]}'
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
urllib.request.urlopen(urllib.request.Request(url, body, headers)).read()
os.write(1, b"\xff\n1.0\n")
"""
CODE = "print(chr(0xd800) + 'printed')"
CALL = f'<tool_call>\n{{"name": "run_python", "arguments": {{"code": "{CODE}"}}}}\n</tool_call>'


def test_the_model_reads_what_its_program_printed(tmp_path: Path) -> None:
    engine = ScriptedEngine(lambda prompt: "done" if "tool\n" in prompt else CALL)
    (group,) = sample(tmp_path, TOOL, engine, max_completion_tokens=200)
    (trajectory,) = group.trajectories
    assert trajectory.reward == 1.0
    assert trajectory.calls[1].observed == "tool: \ufffdprinted\n"


def test_an_episode_may_print_ask_and_return_it(tmp_path: Path) -> None:
    (group,) = sample(tmp_path, PRINT, ScriptedEngine())
    (trajectory,) = group.trajectories
    assert trajectory.reward == 1.0
    json.dumps(trajectory.components, ensure_ascii=False).encode()


def test_a_program_may_print_any_bytes_and_ask_with_an_escape(tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(COMMAND)
    episode = f"command:{sys.executable} {tmp_path / 'client.py'}"
    (group,) = sample(tmp_path, "", ScriptedEngine(), episode=episode)
    assert group.trajectories[0].reward == 1.0


def test_what_an_episode_raises_is_an_error_in_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="raised ValueError: bad") as error:
        sample(tmp_path, RAISE, ScriptedEngine())
    str(error.value).encode()


def test_a_request_of_any_program_may_hold_it() -> None:
    body = b'{"messages": [{"role": "user", "content": "a\\ud800b \\ud83d\\ude00"}]}'
    assert parse_request(body).chat()[0]["content"] == "a\ufffdb \U0001f600"


def test_the_sandbox_passes_on_no_half() -> None:
    with Sandbox("tests.unit.sandbox_cases:make_runner") as sandbox:
        assert sandbox.call("evaluate", "{'a': chr(0xd800)}") == {"a": "\ufffd"}


def test_a_reward_may_print_it(tmp_path: Path) -> None:
    program = tmp_path / "reward.py"
    program.write_text("def score(completion):\n    print(chr(0xd800), flush=True)\n    return 0.5\n")

    async def run(log_path: Path | None) -> float:
        pool = RewardPool([f"{program}:score"], log_path=log_path)
        try:
            return (await pool.score([(make_prompt(), "text")]))[0].reward
        finally:
            pool.close()

    for log_path in (tmp_path / "rewards.log", None):
        assert asyncio.run(run(log_path)) == 0.5


def test_prepared_data_cannot_hold_it(tmp_path: Path) -> None:
    prompt = make_prompt(3, answer=HALF)
    info = PromptFileInfo(
        dataset="x", source_kind="file", source="x", source_sha256="", count=1, seed=0, split="train",
        reward="gsm8k", system="", few_shot=[],
    )  # fmt: skip
    with pytest.raises(DataError, match="row p3 has half a character"):
        write_rows(tmp_path / "train.parquet", [prompt], info)
    assert list(tmp_path.iterdir()) == []


def test_an_argument_that_is_not_utf8_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    command = [str(Path(sys.executable).parent / "skylite").encode(), b"train", b"--data", b"d\xff"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, check=False)
    assert done.returncode == 2
    assert b"not valid UTF-8" in done.stderr
    assert list(tmp_path.iterdir()) == []
