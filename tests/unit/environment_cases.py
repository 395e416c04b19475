"""An environment whose engine is scripted: a tokenizer of bytes, and replies by a function of the prompt."""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import shutil
import tempfile
import textwrap
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

from skylite.data.chat_tokenizer import ChatTokenizer, load_tokenizer
from skylite.engine.interface import Sampling
from skylite.environments.episodes_source import Episodes, episodes_running
from skylite.environments.source import GroupRequest
from skylite.processes.child import Supervisor
from skylite.types import Call, EncodedPrompt, Group, Prompt
from tests.small_run import settings
from tests.tiny_models import CHAT_TEMPLATE, tiny_tokenizer

STOP = 258
"""<|im_end|>"""
Script = Callable[[str], str]


class ScriptedEngine:
    """Answers by `script`, a function of the prompt's text. Records every call."""

    tokens_in_flight = 0

    def __init__(self, script: Script = lambda prompt: "ok", delay_s: float = 0.0) -> None:
        self.script = script
        self.delay_s = delay_s
        self.prompts: list[list[int]] = []
        self.samplings: list[Sampling] = []
        self.models: list[tuple[str, int]] = []
        self.replies: list[tuple[list[int], list[int]]] = []
        """(prompt, completion) in token ids of every finished call."""

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        assert n == 1
        context = list(prompt.token_ids)
        self.prompts.append(context)
        self.samplings.append(sampling)
        self.models.append((model, version))
        await asyncio.sleep(self.delay_s)
        text = self.script(to_text(context))
        ends = [text.find(stop) + len(stop) for stop in sampling.stop if stop in text]
        ids = to_ids(text[: min(ends)]) if ends else [*to_ids(text), STOP]
        cut = len(ids) > sampling.max_tokens
        ids = ids[: sampling.max_tokens]
        self.replies.append((context, ids))
        return [
            Call(
                prompt_token_ids=context,
                completion_token_ids=ids,
                sampling_logprobs=[-0.5] * len(ids),
                finish_reason="length" if cut else "stop",
                adapter_version=version,
                text=to_text(ids[:-1]),
            )
        ]

    def lost_s(self) -> float:
        return 0.0


@functools.cache
def tokenizer() -> Any:
    return tiny_tokenizer()


def to_ids(text: str) -> list[int]:
    ids: list[int] = tokenizer().encode(text, add_special_tokens=False)
    return ids


def to_text(ids: Sequence[int]) -> str:
    text: str = tokenizer().decode(list(ids), skip_special_tokens=False)
    return text


def tokenizer_folder(folder: Path, template: str = CHAT_TEMPLATE) -> Path:
    """A folder with the tokenizer of bytes only."""
    saved = tiny_tokenizer()
    saved.chat_template = template
    saved.save_pretrained(folder)
    return folder


def make_prompt(number: int = 0, **fields: Any) -> Prompt:
    question = [{"role": "user", "content": f"question {number}"}]
    return Prompt(
        **{"id": f"p{number}", "messages": question, "answer": str(number), "source": "test", **fields}
    )


@contextlib.asynccontextmanager
async def environment(
    folder: Path, source: str, *, template: str = CHAT_TEMPLATE, name: str = "episode", **env: Any
) -> AsyncIterator[Episodes]:
    """The environment of an episode with this source code."""
    program = folder / "program.py"
    program.write_text(textwrap.dedent(source), encoding="utf-8")
    spec = env.pop("episode", f"{program}:{name}")
    limits = {"max_prompt_tokens": 500, "max_completion_tokens": 64}
    rollout = {name: env.pop(name, value) for name, value in limits.items()}
    algorithm = env.pop("algorithm", {})
    config = settings(env={"episode": spec, **env}, rollout=rollout, algorithm=algorithm)
    async with (
        Supervisor() as supervisor,
        episodes_running(
            config, shared_tokenizer(template), folder, {}, folder / "logs", supervisor
        ) as running,
    ):
        yield running


@functools.cache
def shared_tokenizer(template: str) -> ChatTokenizer:
    """One sandbox for all tests of this process, because its start takes seconds."""
    folder = Path(tempfile.mkdtemp(prefix="skylite-"))
    tokenizer = load_tokenizer(tokenizer_folder(folder, template))
    shutil.rmtree(folder)
    atexit.register(tokenizer.close)
    return tokenizer


def sample(
    folder: Path,
    source: str,
    engine: ScriptedEngine,
    *,
    num_prompts: int = 1,
    group_size: int = 1,
    **env: Any,
) -> list[Group]:
    """The groups of one step of an environment that starts and ends here."""

    async def run() -> list[Group]:
        async with environment(folder, source, **env) as running:
            prompts = [make_prompt(i) for i in range(num_prompts)]
            return await running.sample(prompts, make_request(engine, group_size=group_size))

    return asyncio.run(run())


def make_request(engine: ScriptedEngine, step: int = 1, **place: int) -> GroupRequest:
    return GroupRequest(
        model="policy-v000003", version=3, engines=[engine], temperature=1.0, step=step, **place
    )
