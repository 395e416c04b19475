"""Many adapter versions, evaluated on one vLLM server at once, sample what each samples alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.vllm.client import VllmClient
from skylite.environments.single_turn import SingleTurn
from skylite.evaluation.evaluate import EvalResult
from skylite.evaluation.versions import ProblemSet, Subject, evaluate_subjects
from skylite.run.run_dir import AdapterVersion
from skylite.types import Prompt, Score
from tests.engines import EngineServer, write_random_adapter
from tests.integration.adapter_versions import PROMPT

pytestmark = pytest.mark.vllm
VERSIONS = (910, 911, 912)


class Length:
    """Scores a completion by its length: no two adapters get the same by chance."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(len(text) / 100) for _, text in items]


def results(server: EngineServer, subjects: list[Subject], max_loras: int) -> dict[str, list[list[int]]]:
    """Subject -> sampled tokens of each problem."""
    prompts = [Prompt(id=str(i), messages=[{"role": "user", "content": str(i)}], answer="", source="t")
               for i in range(6)]  # fmt: skip
    config = TrainConfig.model_validate({"rollout": {"max_completion_tokens": 12}})
    tokenizer = ChatTokenizer(
        run_jobs=lambda jobs: [{"ids": PROMPT[int(job["messages"][0]["content"]) :]} for job in jobs],
        stop_token_ids=(),
    )
    problems = ProblemSet(name="t", prompts=prompts, source=SingleTurn(config, tokenizer, Length()))
    found: dict[str, list[list[int]]] = {}

    def keep(subject: Subject, _: ProblemSet, result: EvalResult) -> None:
        found[subject.name] = [g.trajectories[0].calls[0].completion_token_ids for g in result.groups]

    async def run() -> None:
        engine = RetryingEngine(VllmClient("vllm-test", server.address))
        try:
            await evaluate_subjects(engine, subjects, [problems], 1, max_loras=max_loras, on_result=keep)
        finally:
            await engine.aclose()

    asyncio.run(run())
    return found


def test_versions_at_once_equal_versions_alone(server: EngineServer, tmp_path: Path) -> None:
    folders = [write_random_adapter(tmp_path / str(v), server.model_path, seed=v) for v in VERSIONS]
    subjects = [
        Subject(None),
        *(Subject(AdapterVersion(*pair)) for pair in zip(VERSIONS, folders, strict=True)),
    ]
    together = results(server, subjects, max_loras=2)
    assert len({str(tokens) for tokens in together.values()}) == 4, "four models"
    alone = results(server, subjects, max_loras=1)
    assert together == alone
    loaded = [m["id"] for m in server.http.get("/v1/models").json()["data"]]
    assert loaded == [server.base], "every adapter was unloaded"
