"""Chat templates of model families: the trained ids are the engine's, and which conversations branch."""

from __future__ import annotations

import asyncio
import functools
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from skylite.data.chat_tokenizer_in_sandbox import run_jobs
from skylite.environments.trajectory_log import TrajectoryLog
from skylite.model.packing import pack_tree
from skylite.rollout.step_metrics import turn_metrics
from skylite.run.rollout_file import read_examples, write_rollouts
from skylite.types import Group, Prompt, Trajectory
from tests.small_run import settings
from tests.unit.template_cases import FAMILIES, TemplateEngine, server_of, tokenizer_of
from tests.unit.template_conversations import (
    ADD,
    CONVERSATIONS,
    QUESTION,
    REWRITTEN,
    SYSTEM,
    Refused,
    plain,
    replies_of,
    thinking,
    tools,
    with_system,
)  # fmt: skip

DOCS = Path(__file__).parents[2] / "docs" / "how-to" / "environments.md"


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=[family.name for family in FAMILIES])
def test_a_reply_to_learn_follows_its_prompt(number: int) -> None:
    family, tokenizer = FAMILIES[number], tokenizer_of(number)
    stops = [tokenizer.convert_tokens_to_ids(stop) for stop in family.stops]
    first = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yes."}]
    for chat in (
        first,
        [*first, {"role": "user", "content": "And?"}, {"role": "assistant", "content": "No."}],
    ):
        job = {"messages": chat, "tools": None, "arguments": family.arguments, "learned": [len(chat) - 1]}
        start = {**job, "messages": chat[:-1]}
        del start["learned"]
        result, before = run_jobs(tokenizer, family.stops, [job, start])
        if family.name == "DeepSeek-R1 distilled":  # its prompt opens a reasoning block that no reply has
            assert "does not show a reply right after its prompt" in result["error"]
            continue
        ((prompt, reply),) = result["calls"]
        assert prompt == before["ids"]
        text = chat[-1]["content"] + family.stop
        assert tokenizer.decode(reply).endswith(text)
        assert tokenizer.decode(reply[:-1]).rstrip() != ""
        assert [token for token in reply if token in stops] == [reply[-1]]


@functools.cache
def hold(number: int, conversation: Any, history: str = "sampled") -> tuple[Any, Any]:
    """The engine and the log of one conversation over HTTP. Raises Refused."""
    family = FAMILIES[number]
    config = settings(
        env={"episode": "x.py:f", "history": history, "max_tokens": 50_000},
        rollout={"max_prompt_tokens": 20_000, "max_completion_tokens": 500},
        data={"template_args": family.arguments},
    )
    folder = Path(tempfile.mkdtemp(prefix="skylite-"))
    server = server_of(number, config, folder)
    engine: Any = TemplateEngine(number, replies_of(family, conversation))
    log = TrajectoryLog(name="p0", model="m", version=1, engine=engine, seed=1, temperature=1.0)

    async def run() -> None:
        async with server.serving(), httpx.AsyncClient(trust_env=False) as client:
            headers = {"Authorization": f"Bearer {server.open(log)}"}

            async def ask(messages: list[Any]) -> Any:
                body = {"messages": messages} | ({"tools": [ADD]} if conversation is tools else {})
                url = f"{server.base_url}/chat/completions"
                reply = await client.post(url, json=body, headers=headers)
                if reply.status_code != 200:
                    raise Refused(reply.json()["error"]["message"])
                return reply.json()["choices"][0]["message"]

            await conversation(ask)

    try:
        asyncio.run(run())
    finally:
        folder.rmdir()
    return engine, log


def branches(log: TrajectoryLog, tokenizer: Any = None) -> int:
    """With a tokenizer: of the texts, so that another tokenization of the same text is no branch."""
    samples = [c.call for c in log.calls]
    if tokenizer is not None:
        samples = [
            replace(
                s,
                prompt_token_ids=list(tokenizer.decode(s.prompt_token_ids).encode()),
                completion_token_ids=list(tokenizer.decode(s.completion_token_ids).encode()),
            )
            for s in samples
        ]
    trajectory = Trajectory(calls=tuple(samples), reward=0.0)
    return round(turn_metrics([trajectory])["turns/branches_mean"])


def trained(log: TrajectoryLog, path: Path) -> list[tuple[list[int], list[int]]]:
    """(prompt, completion) of each call as the trainer packs them, read back from the rollout file."""
    samples = tuple(c.call for c in log.calls)
    prompt = Prompt(id="p0", messages=[QUESTION], answer="42", source="")
    write_rollouts(path, [Group(prompt=prompt, trajectories=(Trajectory(calls=samples, reward=1.0),))])
    calls = [replace(e, trajectory=e.turn) for e in read_examples(path)]  # a segment each
    packed = pack_tree(calls, torch.device("cpu"))
    nodes, found = packed.inputs["input_ids"][0].tolist(), []
    ends, depths = packed.inputs["tree"].ends.tolist(), packed.inputs["position_ids"][0].tolist()
    kept = packed.inputs["logits_to_keep"].tolist()
    for call in range(len(calls)):
        of_call = packed.segments == call
        rows, targets = packed.rows[of_call].tolist(), packed.targets[of_call].tolist()
        first = kept[rows[0]]  # the node that predicts the first sampled token: the prompt's last
        chain = [n for n in range(first + 1) if n <= first < ends[n]]
        assert [depths[n] for n in chain] == list(range(len(chain)))
        found.append(([nodes[n] for n in chain], targets))
    return found


REFUSED = {
    ("Gemma 2", tools): "roles must alternate",
    ("Gemma 2", with_system): "System role not supported",
    ("Gemma 3", tools): "roles must alternate",
}
"""What a template does not take, and its own words."""


def name_of(number: int) -> str:
    return FAMILIES[number].name


@pytest.mark.parametrize("history", ["sampled", "template"])
@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=name_of)
def test_trained_ids_are_the_engines(number: int, history: str, tmp_path: Path) -> None:
    for conversation in CONVERSATIONS:
        if words := REFUSED.get((FAMILIES[number].name, conversation)):
            with pytest.raises(Refused, match=words):
                hold(number, conversation, history)
            continue
        engine, log = hold(number, conversation, history)
        assert len(engine.calls) >= 3
        assert trained(log, tmp_path / f"{conversation.__name__}.parquet") == engine.calls


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=name_of)
def test_only_rewritten_history_branches(number: int) -> None:
    for conversation in CONVERSATIONS:
        if (FAMILIES[number].name, conversation) not in REFUSED:
            _, log = hold(number, conversation)
            assert branches(log) == REWRITTEN.get(conversation, 0), conversation.__name__


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=name_of)
def test_every_call_shows_the_system_text(number: int) -> None:
    """Where the template merges it into a user turn, too."""
    if (FAMILIES[number].name, with_system) in REFUSED:
        return
    _, log = hold(number, with_system)
    assert len(log.calls) == 3
    for call in log.calls:
        assert SYSTEM in tokenizer_of(number).decode(call.call.prompt_token_ids)


@pytest.mark.parametrize("number", range(len(FAMILIES)), ids=name_of)
def test_a_continued_prompt_is_the_text_that_the_template_writes(number: int) -> None:
    """Replies without reasoning, as the template itself writes them."""
    family, tokenizer = FAMILIES[number], tokenizer_of(number)
    _, sampled = hold(number, plain)
    _, anew = hold(number, plain, "template")
    for ours, theirs in zip(sampled.calls, anew.calls, strict=True):
        text, expected = (tokenizer.decode(c.call.prompt_token_ids) for c in (ours, theirs))
        for before, after in SAMPLED_OTHERWISE.get(family.name, ()):
            text = text.replace(before, after)
        assert text == expected


SAMPLED_OTHERWISE = {
    "Qwen3, not thinking": [("<think>\n\n</think>\n\nanswer", "answer")],
    "Qwen3.5": [("<think>\n\n</think>\n\nanswer", "answer")],
    "GPT-OSS": [("<|return|>", "<|end|>")],
    "DeepSeek-R1 distilled": [("<think>\nHm.\n</think>\n\n", "")],
}
"""What these models sample and their templates leave out of the history or write in another way."""


def documented_table() -> str:
    """Branches under env.history=template, and whether a tool's result reaches the model."""
    lines = [
        "| chat template | plain | reasoning | tools | tool results |",
        "|---|---|---|---|---|",
    ]
    for number, family in enumerate(FAMILIES):
        cells = [_branches_anew(number, c) for c in (plain, thinking, tools)]
        lines.append(f"| {family.name} | {' | '.join(cells)} | {_results(number)} |")
    return "\n".join(lines)


def _branches_anew(number: int, conversation: Any) -> str:
    try:
        _, log = hold(number, conversation, "template")
    except Refused:
        return "refused"
    return f"{branches(log, tokenizer_of(number))} of {len(log.calls) - 1}"


def _results(number: int) -> str:
    try:
        _, log = hold(number, tools)
    except Refused:
        return "refused"
    texts = [tokenizer_of(number).decode(c.call.prompt_token_ids) for c in log.calls]
    shown = ["result 0" in texts[1], "result 0" in texts[3], "result 1" in texts[3]]
    if all(shown):
        return "shown"
    return "partly" if any(shown) else "left out"


def test_the_documented_table_is_what_the_templates_do() -> None:
    table = documented_table()
    assert table in DOCS.read_text(encoding="utf-8"), f"put this table into {DOCS.name}:\n{table}"


def test_a_later_call_repeats_the_earlier_ones_ids() -> None:
    engine, _ = hold(0, plain)
    for before, after in pairwise(engine.calls):
        known = before[0] + before[1]
        assert after[0][: len(known)] == known
    tokenizer = tokenizer_of(0)
    again = [tokenizer.encode(tokenizer.decode(c), add_special_tokens=False) for _, c in engine.calls]
    assert again != [c for _, c in engine.calls], "the replies would be the same if they were tokenized again"
