"""Which passes trainer.tokens_per_micro_batch=auto measures: the longest real prompts and completions."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from skylite.config.train import RunConfig, TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.model.packing import PackedTokens
from skylite.model.policy import Policy, score
from skylite.model.process_group import Dist
from skylite.rollout.plan import RunPlan
from skylite.rollout.run_session import LONGEST_PROMPTS, longest_prompt_tokens
from skylite.trainer import micro_batch_memory
from skylite.trainer.micro_batch_memory import SAFETY, measure_micro_batch_tokens
from tests.cases import policy_of
from tests.decisions import resolved
from tests.small_run import settings
from tests.unit.data_cases import prompt


class CountedWords:
    """A tokenizer: a token for each Latin word and for each Chinese character."""

    def __init__(self) -> None:
        self.encoded = 0

    def encode_chats(self, chats: list[Any]) -> list[list[int]]:
        self.encoded += len(chats)
        texts = [chat.messages[0]["content"] for chat in chats]
        return [[1] * (len(t.split()) if t.isascii() else len(t)) for t in texts]


@pytest.mark.parametrize(
    ("texts", "limit", "longest"),
    [
        (["a", "a b c", "a b"], 100, 3),
        (["many-syllables " * 9, "o " * 60, *["a"] * 100], 100, 60),
        (["o " * 60, "o " * 40, "o " * 20], 50, 40),
        (["o " * 60], 50, 50),
        (["word " * 30, "字" * 100, *["longerword " * 14] * LONGEST_PROMPTS], 200, 100),
    ],
    ids=["longest", "one of the longest texts", "only sampled ones", "none is sampled", "in bytes"],
)
def test_the_longest_training_prompt_is_probed(texts: list[str], limit: int, longest: int) -> None:
    config = settings(rollout={"max_prompt_tokens": limit, "max_completion_tokens": 16})
    train = [prompt(messages=[{"role": "user", "content": text}]) for text in texts]
    tokenizer = CountedWords()
    plan = cast("RunPlan", SimpleNamespace(train=train, config=config))
    assert longest_prompt_tokens(cast("ChatTokenizer", tokenizer), plan) == longest
    assert tokenizer.encoded <= LONGEST_PROMPTS


def measured(
    monkeypatch: pytest.MonkeyPatch,
    policy: Policy,
    config: TrainConfig,
    dist: Dist,
    free: float,
    longest: int,
) -> tuple[list[tuple[int, int, int]], int, str]:
    """The passes (sequences, prompt, completion), and what came out."""
    passes = record_passes(monkeypatch)
    monkeypatch.setattr(micro_batch_memory, "_free_bytes", lambda *_: free / SAFETY)
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(Path(), Path()))
    return passes, *measure_micro_batch_tokens(policy, run_config, longest, dist)


def record_passes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """Replace the measured passes with ones that take 100 bytes and 2 per token."""
    passes: list[tuple[int, int, int]] = []

    def run_pass(_: Policy, count: int, prompt: int, completion: int) -> tuple[int, float]:
        passes.append((count, prompt, completion))
        tokens = prompt + count * completion
        return tokens, 100.0 + 2 * tokens

    monkeypatch.setattr(micro_batch_memory, "_measured_pass", run_pass)
    return passes


@pytest.mark.parametrize(
    ("completion", "free", "counts", "tokens"),
    [
        (64, 1e4, (4, 12), 4928),  # (10,000 - 100) / 2 = 4,950, rounded down to a multiple of 64
        (200, 1e4, (1, 3), 4928),
        # One sequence of 2,000 tokens and the prompt of 50 take 4,200 bytes, so two fit for sure.
        (2000, 8500, (1, 2), 4160),  # (8,500 - 100) / 2 = 4,200
        # Nothing more fits for sure: 2,050 tokens took 4,200 bytes, so 8,000 bytes hold 3,904.
        (2000, 8000, (1,), 3904),
    ],
)
def test_the_passes_have_the_longest_prompt_and_completions_and_fit(
    tiny_llama: Path,
    dist: Dist,
    monkeypatch: pytest.MonkeyPatch,
    completion: int,
    free: float,
    counts: tuple[int, ...],
    tokens: int,
) -> None:
    config = settings(rollout={"max_prompt_tokens": 100, "max_completion_tokens": completion})
    policy = policy_of(tiny_llama, config, dist)
    passes, found, reason = measured(monkeypatch, policy, config, dist, free, longest=50)
    assert passes == [(count, 50, completion) for count in counts]
    assert found == tokens
    assert ("beside which no second one fits" in reason) == (len(counts) == 1)


@pytest.mark.parametrize(
    ("share", "tokens"),
    [
        (110_000, 42_432),  # 100,000 are left of it; (85,000 - 100) / 2 = 42,450
        (None, 25_408),  # (51,000 - 100) / 2 = 25,450
    ],
    ids=["a share", "no share"],
)
def test_on_a_gpu_the_rest_of_the_ranks_share_is_free(
    dist: Dist, monkeypatch: pytest.MonkeyPatch, share: int | None, tokens: int
) -> None:
    """Without a share it is what no process uses, of which SAFETY leaves 85 %."""
    record_passes(monkeypatch)
    gpu = torch.device("cuda", 1)
    monkeypatch.setattr(torch.cuda, "memory_allocated", {gpu: 10_000}.__getitem__)
    monkeypatch.setattr(torch.cuda, "mem_get_info", {gpu: (60_000, 200_000)}.__getitem__)
    found = resolved(Path(), Path(), placement={"device": "cuda"}, memory={"trainer_bytes": share})
    run_config = RunConfig(skylite_version="test", config=settings(), resolved=found)
    policy = cast("Policy", SimpleNamespace(device=gpu))
    assert measure_micro_batch_tokens(policy, run_config, 50, dist)[0] == tokens


def test_an_episode_is_probed_at_its_full_length() -> None:
    """All calls of an episode are one trajectory, of env.max_tokens tokens at most."""
    config = settings(rollout={"max_prompt_tokens": 100, "max_completion_tokens": 64})
    assert config.source.completion_after(50) == 64
    env = config.env.model_copy(update={"episode": "calculator", "max_tokens": 3000})
    assert config.model_copy(update={"env": env}).source.completion_after(50) == 2950


def test_the_measured_pass_is_one_group_of_real_length(
    tiny_llama: Path, dist: Dist, monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = policy_of(tiny_llama, settings(), dist)
    packed: list[Any] = []

    def counted(policy: Policy, tokens: PackedTokens, temperature: float) -> Any:
        packed.append(tokens)
        return score(policy, tokens, temperature)

    monkeypatch.setattr(micro_batch_memory, "score", counted)
    nodes = micro_batch_memory._measured_pass(policy, 3, 20, 7)[0]
    assert nodes == packed[0].num_nodes == 20 + 3 * (7 - 1), "a tree; the last token predicts nothing"
    assert len(packed[0].targets) == 3 * 7
