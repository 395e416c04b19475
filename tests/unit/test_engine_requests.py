"""What is sent to vLLM, word for word, and what the retrying client does with its answers."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skylite.config.rollout import GREEDY
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.connections import Address
from skylite.engine.interface import Sampling
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.vllm.client import VllmClient
from skylite.engine.watchdog import wait_ready
from skylite.environments.single_turn import SingleTurn
from skylite.environments.source import EVAL_STEP, GroupRequest, gather_or_cancel, request_seed
from skylite.errors import EngineFailed, RunFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Call, EncodedPrompt, ImageTokens, Prompt, Score
from tests.pictures import picture
from tests.unit.bad_server import SAMPLING, ask_for, choice, talk
from tests.unit.data_cases import prompt
from tests.unit.test_engine_client import LosingClient, replies, sampled

LOG = Path("engine-0.log")


def requests_of(folder: Path, behave: Any, ask: Any) -> tuple[Any, list[tuple[str, Any]]]:
    """The answer, and the requests with their JSON."""
    seen: list[tuple[str, str]] = []
    answer = asyncio.run(talk(folder, behave, ask, 60.0, seen))
    return answer, [(line, json.loads(body) if body else None) for line, body in seen]


def test_a_request_for_samples_sets_every_parameter(tmp_path: Path) -> None:
    """vLLM fills in what is missing from the model's generation_config.json."""
    sampling = replace(SAMPLING, temperature=0.7, top_p=0.9, top_k=20, stop_token_ids=(5, 6))
    _, seen = requests_of(
        tmp_path, sampled(choice()), lambda c: c.generate("m", EncodedPrompt((7, 8)), 1, sampling, version=3)
    )
    body = {
        "model": "m", "prompt": [7, 8],
        "n": 1, "max_tokens": 4, "temperature": 0.7, "top_p": 0.9, "top_k": 20,
        "min_p": 0.0, "repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0,
        "stop": [], "include_stop_str_in_output": False, "ignore_eos": False,
        "stop_token_ids": [5, 6], "seed": 40, "logprobs": 0, "return_token_ids": True,
            "vllm_xargs": {"skylite_batched": 1},
    }  # fmt: skip
    assert seen == [("POST /v1/completions", body)]


def test_a_request_for_logprobs(tmp_path: Path) -> None:
    rows = [None, {"8": {"logprob": -1.5}, "9": {"logprob": -0.1}}, {"9": {"logprob": -2.0}}]
    answer, seen = requests_of(
        tmp_path,
        replies({"choices": [{"prompt_logprobs": rows}]}),
        lambda c: c.score("m", EncodedPrompt((7, 8, 9))),
    )
    assert answer == [-1.5, -2.0]
    body = {"model": "m", "prompt": [7, 8, 9], "max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
    assert seen == [("POST /v1/completions", body)]


def test_a_request_for_the_most_likely_tokens(tmp_path: Path) -> None:
    """vLLM adds the prompt's own token, here 8 and 9, to those that were asked for."""
    first = {"8": {"logprob": -5.0}, "4": {"logprob": -0.9}, "3": {"logprob": -0.6}}
    rows = [None, first, {"9": {"logprob": -0.2}, "1": {"logprob": -2.0}}]
    answer, seen = requests_of(
        tmp_path,
        replies({"choices": [{"prompt_logprobs": rows}]}),
        lambda c: c.top_tokens("m", (7, 8, 9), 2),
    )
    assert answer == [[(3, -0.6), (4, -0.9)], [(9, -0.2), (1, -2.0)]]
    assert seen[0][1]["prompt_logprobs"] == 2


def test_adapters_are_loaded_and_unloaded_by_name(tmp_path: Path) -> None:
    adapter = AdapterVersion(1, tmp_path / "policy-v000001")
    _, seen = requests_of(tmp_path, replies(""), lambda c: c.load_adapter(adapter))
    name = {"lora_name": "policy-v000001"}
    assert seen == [
        ("POST /v1/load_lora_adapter", {**name, "lora_path": str(adapter.path), "is_3d_lora_weight": True})
    ]
    for status in (200, 404):
        _, seen = requests_of(tmp_path, replies("", status), lambda c: c.unload_adapter(adapter.name))
        assert seen == [("POST /v1/unload_lora_adapter", name)]
    for status, kind in ((400, "SyncFailed"), (500, "EngineFailed")):
        with pytest.raises(RunFailed, match="could not unload adapter policy-v000001: why") as caught:
            asyncio.run(
                talk(tmp_path, replies("why", status), lambda c: c.unload_adapter(adapter.name), 60.0)
            )
        assert type(caught.value).__name__ == kind


def test_the_token_count_is_the_sum_over_both_kinds_and_all_engines(tmp_path: Path) -> None:
    text = (
        '# HELP vllm:prompt_tokens_total x\nvllm:prompt_tokens_total{engine="0"} 10.0\n'
        'vllm:prompt_tokens_total{engine="1"} 2.5\nvllm:generation_tokens_total 4.0\nvllm:other_total 9.0\n'
    )
    answer, seen = requests_of(tmp_path, replies(text), lambda c: c.progress())
    assert answer == 16.5
    assert [line for line, _ in seen] == ["GET /health", "GET /metrics"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"error": {"message": "m" * 500}}, f"refused adapter policy-v000001: {'m' * 400}$"),
        ({"error": "text"}, "policy-v000001: text$"),
        ({"message": "flat"}, "policy-v000001: flat$"),
        ([1, 2], r"policy-v000001: \[1, 2\]$"),
        ("p" * 500, f"policy-v000001: {'p' * 400}$"),
    ],
)
def test_the_reason_in_an_error_reply_is_shown_shortened(tmp_path: Path, body: Any, words: str) -> None:
    adapter = AdapterVersion(1, tmp_path)
    with pytest.raises(EngineFailed) as caught:
        asyncio.run(talk(tmp_path, replies(body, 400), lambda c: c.load_adapter(adapter), 60.0))
    assert caught.match(words)


def test_waiting_for_a_server_ends_when_it_serves_or_at_the_deadline(tmp_path: Path) -> None:
    async def starting(writer: asyncio.StreamWriter, number: int) -> None:
        await replies("", 200 if number == 2 else 503)(writer, number)

    _, seen = requests_of(tmp_path, starting, lambda c: wait_ready(c, 30.0, LOG))
    assert [line for line, _ in seen] == ["GET /health"] * 3
    with pytest.raises(RunFailed, match="engine-0 did not serve within 0 s"):
        asyncio.run(talk(tmp_path, replies("", 503), lambda c: wait_ready(c, 0.3, LOG)))
    assert not asyncio.run(VllmClient("x", Address.of_socket(tmp_path / "nothing")).is_ready())


def test_requests_wait_while_the_engine_is_paused_and_continue_with_the_new_server() -> None:
    """A failure during the pause does not count as an attempt."""

    class Broken(LosingClient):
        async def generate(self, *arguments: Any) -> list[Any]:
            engine.pause()
            raise EngineFailed("connection lost")

        async def aclose(self) -> None:
            closed.append("old")

    closed: list[str] = []
    new = LosingClient({0})

    async def run() -> list[Any]:
        request = asyncio.ensure_future(engine.generate("m", EncodedPrompt([7]), 1, SAMPLING, 0))
        await asyncio.sleep(0.05)
        assert not request.done()
        await engine.resume(new)  # type: ignore[arg-type]
        return await request

    engine = RetryingEngine(Broken(), ())  # type: ignore[arg-type]
    samples = asyncio.run(run())
    assert [s.completion_token_ids for s in samples] == [[40]]
    assert closed == ["old"]


def test_an_adapter_whose_reply_was_lost_is_unloaded_before_the_next_attempt() -> None:
    class Losing:
        name, done = "engine-0", list[str]()

        async def load_adapter(self, adapter: AdapterVersion) -> None:
            self.done.append("load")
            if len(self.done) < 2:
                raise EngineFailed("reply lost")

        async def unload_adapter(self, name: str) -> None:
            self.done.append(f"unload {name}")

    client, adapter = Losing(), AdapterVersion(3, Path("/a"))
    engine = RetryingEngine(client, (0.0,))  # type: ignore[arg-type]
    asyncio.run(engine.load_adapter(adapter))
    assert client.done == ["load", "unload policy-v000003", "load"]
    assert engine.adapters == {"policy-v000003": adapter}
    asyncio.run(engine.unload_adapter("policy-v000003"))
    assert engine.adapters == {}
    assert client.done[3:] == ["unload policy-v000003"]


def test_the_seeds_of_requests_are_far_apart() -> None:
    seeds = [
        request_seed(*key) for key in ((0, 1, 0), (0, 1, 1), (0, 2, 0), (1, 1, 0), (0, 11, 0), (0, 1, 10))
    ]
    assert seeds[0] == 0x57C3AB1A1E0F, "sha256 of 0/1/0"
    assert min(abs(a - b) for a in seeds for b in seeds if a is not b) > 10**6
    assert max(request_seed(0, 1, i) for i in range(200)) > 2**47, "all 48 bits are used"


def test_a_group_holds_score_and_penalty_of_each_completion() -> None:
    class Scorer:
        async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
            return [Score(reward=float(n), components={"a": n}) for n, _ in enumerate(items)]

    config = TrainConfig.model_validate(
        {"rollout": {"max_completion_tokens": 2}, "algorithm": {"overlong_buffer_frac": 1.0}}
    )
    tokenizer = ChatTokenizer(run_jobs=lambda jobs: [{"ids": [7]}] * len(jobs), stop_token_ids=(5,))
    source = SingleTurn(config, tokenizer, Scorer())
    request = GroupRequest(
        model="m", version=3, temperature=1.0, group_size=2,
        engines=[RetryingEngine(LosingClient({0, 1}), ())],  # type: ignore[arg-type]
    )  # fmt: skip
    (group,) = asyncio.run(source.sample([prompt()], request))
    assert [(t.reward, t.penalty, dict(t.components)) for t in group.trajectories] == [
        (0.0, -0.5, {"a": 0}), (1.0, -0.5, {"a": 1}),
    ]  # fmt: skip
    assert [t.calls[0].adapter_version for t in group.trajectories] == [3, 3]


@pytest.mark.parametrize("step", [1, EVAL_STEP])
def test_remax_scores_a_greedy_completion_beside_the_group(step: int) -> None:
    """It is no trajectory, and no evaluation asks for it."""
    asked, batches = list[tuple[int, float]](), list[int]()

    class Engine:
        tokens_in_flight = 0

        async def generate(
            self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
        ) -> list[Call]:
            asked.append((n, sampling.temperature))
            length = 2 if sampling.temperature else 4
            return [
                Call(
                    prompt_token_ids=list(prompt.token_ids),
                    completion_token_ids=[9] * length,
                    sampling_logprobs=[-1.0] * length,
                    text="x" * length,
                )
            ] * n

    class Length:
        async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
            batches.append(len(items))
            return [Score(reward=len(text) / 8, components={"long": len(text) / 8}) for _, text in items]

    config = TrainConfig.model_validate(
        {
            "rollout": {"max_completion_tokens": 4, "group_size": 2},
            "algorithm": {"name": "remax", "overlong_buffer_frac": 0.5},
        }
    )
    tokenizer = ChatTokenizer(run_jobs=lambda jobs: [{"ids": [7]}] * len(jobs), stop_token_ids=(5,))
    request = GroupRequest(model="m", version=3, temperature=1.0, group_size=2, step=step, engines=[Engine()])  # type: ignore[list-item]
    (group,) = asyncio.run(SingleTurn(config, tokenizer, Length()).sample([prompt()], request))
    trajectory, _ = group.trajectories
    assert (trajectory.reward, len(trajectory.calls[0].completion_token_ids)) == (0.25, 2)
    greedy = {} if step == EVAL_STEP else {GREEDY: 0.5 - 1.0}  # its penalty counts, as in the others'
    assert dict(trajectory.components) == {"long": 0.25, **greedy}
    assert asked == ([(2, 1.0)] if step == EVAL_STEP else [(2, 1.0), (1, 0.0)])
    assert batches == ([2] if step == EVAL_STEP else [2, 1]), "a reward may compare what it gets"


@pytest.mark.parametrize("fails", [False, True])
def test_a_group_goes_to_the_engine_with_the_fewest_tokens_in_flight(fails: bool) -> None:
    """100 + 2 x 2 tokens on the first engine outweigh four times 10 + 2 x 2 on the second."""

    class Slow:
        def __init__(self) -> None:
            self.tokens_in_flight, self.lengths, self.most = 0, list[int](), 0

        async def generate(
            self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
        ) -> list[Call]:
            self.lengths.append(len(prompt.token_ids))
            self.most = max(self.most, self.tokens_in_flight)
            await asyncio.sleep(0.01)
            if fails:
                raise RunFailed("gone")
            ids = list(prompt.token_ids)
            call = Call(
                prompt_token_ids=ids, completion_token_ids=[], sampling_logprobs=[], adapter_version=version
            )
            return [call] * n

        def lost_s(self) -> float:
            return 0.0

    class Zero:
        async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
            return [Score(reward=0.0) for _ in items]

    lengths = [100, 10, 10, 10, 10, 50]
    config = TrainConfig.model_validate({"rollout": {"max_completion_tokens": 2}})
    tokenizer = ChatTokenizer(run_jobs=lambda jobs: [{"ids": [7] * n} for n in lengths], stop_token_ids=(5,))
    engines = [Slow(), Slow()]
    request = GroupRequest(model="m", version=3, temperature=1.0, group_size=2, engines=engines)
    prompts = [prompt(id=str(i), messages=[{"role": "user", "content": str(i)}]) for i in range(6)]
    with pytest.raises(RunFailed, match="gone") if fails else nullcontext():
        asyncio.run(SingleTurn(config, tokenizer, Zero()).sample(prompts, request))
    assert [engine.lengths for engine in engines] == [[100], [10, 10, 10, 10, 50]]
    assert [engine.most for engine in engines] == [104, 4 * 14 + 54]
    assert [engine.tokens_in_flight for engine in engines] == [0, 0]


def test_the_first_failure_cancels_the_other_tasks() -> None:
    async def run() -> tuple[list[int], bool]:
        async def fail() -> int:
            raise RunFailed("first")

        assert await gather_or_cancel([asyncio.ensure_future(asyncio.sleep(0, n)) for n in (1, 2)]) == [1, 2]
        slow = asyncio.ensure_future(asyncio.sleep(60, 1))
        with pytest.raises(RunFailed, match="first"):
            await gather_or_cancel([slow, asyncio.ensure_future(fail())])
        await asyncio.sleep(0)
        return [], slow.cancelled()

    assert asyncio.run(run()) == ([], True)


def test_a_sample_has_what_vllm_returned(tmp_path: Path) -> None:
    found, _ = requests_of(tmp_path, sampled(choice(), choice(1, finish_reason="length")), ask_for(2))
    assert [found[i].finish_reason for i in (0, 1)] == ["stop", "length"]
    assert (found[0].prompt_token_ids, found[0].text) == ([7, 8], "ab")
    full = choice(token_ids=[1] * SAMPLING.max_tokens, logprobs={"token_logprobs": [-1.0] * 4})
    found, _ = requests_of(tmp_path, sampled(full), ask_for(1))
    assert len(found[0].completion_token_ids) == SAMPLING.max_tokens


def test_a_prompt_with_images_is_sent_as_token_ids_with_images(tmp_path: Path) -> None:
    """One token for each image: vLLM repeats it, and must arrive at the tokens that skylite counted."""
    data = picture(1, 8, 4)
    images = (ImageTokens(1, 3, data), ImageTokens(5, 1, data))
    reply = {
        "model": "m",
        "prompt_token_ids": [7, 9, 9, 9, 8, 9],
        "choices": [
            {
                "index": 0,
                "text": "ab",
                "token_ids": [1, 2],
                "logprobs": {"content": [{"token": "a", "logprob": -1.0}, {"token": "b", "logprob": -2.0}]},
                "finish_reason": "stop",
            },
            {"index": 1, "finish_reason": "abort"},
        ],
    }
    ids: Any = reply["prompt_token_ids"]
    (call, dropped), seen = requests_of(
        tmp_path,
        replies(reply),
        lambda c: c.generate("m", EncodedPrompt(ids, images), 2, SAMPLING, version=3),
    )
    assert (call.prompt_token_ids, call.completion_token_ids) == (ids, [1, 2])
    assert (call.sampling_logprobs, call.images, dropped) == ([-1.0, -2.0], images, None)
    [(line, body)] = seen
    assert line == "POST /inference/v1/generate"
    url = f"data:image/png;base64,{base64.b64encode(data).decode()}"
    assert body["token_ids"] == [7, 9, 8, 9]
    assert body["content_parts"] == [{"type": "image_url", "url": url}] * 2
    assert (body["return_token_ids"], body["output_mode"]) == (True, "text")
    assert body["sampling_params"]["n"] == 2
    assert body["sampling_params"]["logprobs"] == 0
    with pytest.raises(EngineFailed, match=r"from another prompt .* 6 tokens instead of 5"):
        requests_of(
            tmp_path,
            replies(reply),
            lambda c: c.generate("m", EncodedPrompt(ids[:-1], images[:1]), 2, SAMPLING, version=3),
        )
