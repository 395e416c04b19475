"""When the scheduler sends sampled tokens. Outputs and requests are made up, with the fields of vLLM's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.plugin.batched_outputs import HOLD_S, MARK, SWITCH, HeldOutputs, is_marked, untested
from tests.unit.engine_cases import PUBLIC, SPEC

START = 100.0
STEP_S = HOLD_S / 10


class Logprobs(NamedTuple):
    """vLLM's LogprobsLists of one request."""

    logprob_token_ids: Any
    logprobs: Any
    sampled_token_ranks: Any
    cu_num_generated_tokens: Any = None


def params(**changes: Any) -> SimpleNamespace:
    marked = {
        "extra_args": {MARK: 1},
        "output_kind": SimpleNamespace(name="FINAL_ONLY"),
        "logprobs": 0,
        "prompt_logprobs": None,
        "stop": [],
    }
    return SimpleNamespace(**marked | changes)


def output(
    name: str, *tokens: int, finish: str | None = None, prefill: str | None = None, events: Any = None
) -> SimpleNamespace:
    """The logprob of token t is -t."""
    values = np.array(tokens, dtype=np.float32)[:, None]
    return SimpleNamespace(
        request_id=name,
        new_token_ids=list(tokens),
        new_logprobs=Logprobs(values, -values, values[:, 0]) if tokens else None,
        finish_reason=finish,
        prefill_stats=prefill,
        events=events,
    )


def started(*names: str) -> tuple[HeldOutputs, dict[str, Any]]:
    """Marked requests whose first token, 0, is sent."""
    held, requests = HeldOutputs(), {name: SimpleNamespace(sampling_params=params()) for name in names}
    firsts = [output(name, 0, prefill="stats") for name in names]
    assert read(held.exchange(firsts, requests, START)) == [(name, [0], [0.0], None) for name in names]
    return held, requests


def read(outputs: list[Any]) -> list[tuple[str, list[int], list[float], str | None]]:
    """(request, tokens, logprobs, why it ended) of each."""
    return [
        (
            sent.request_id,
            sent.new_token_ids,
            sent.new_logprobs.logprobs[:, 0].tolist() if sent.new_logprobs else [],
            sent.finish_reason,
        )
        for sent in outputs
    ]


def test_tokens_wait_for_the_end_of_their_request() -> None:
    held, requests = started("a", "b")
    for step, token in enumerate((1, 2), start=1):
        outputs = [output("a", token), output("b", 10 * token)]
        assert held.exchange(outputs, requests, START + step * STEP_S) == []
    last = [output("a", 3, finish="length"), output("b", 30)]
    del requests["a"]  # as vLLM does before it returns a last output
    assert read(held.exchange(last, requests, START + 3 * STEP_S)) == [
        ("a", [1, 2, 3], [-1.0, -2.0, -3.0], "length")
    ]
    assert read(held.exchange([output("b", 40, finish="stop")], {}, START + 4 * STEP_S)) == [
        ("b", [10, 20, 30, 40], [-10.0, -20.0, -30.0, -40.0], "stop")
    ]


def test_no_token_waits_longer_than_the_limit() -> None:
    """So the count of tokens that the watchdog reads keeps growing."""
    held, requests = started("a")
    sent = []
    for step in range(1, 26):
        sent += [
            (step, len(got.new_token_ids))
            for got in held.exchange([output("a", step)], requests, START + step * STEP_S)
        ]
    assert sent == [(10, 10), (20, 10)]


@pytest.mark.parametrize(
    "change",
    [
        {"extra_args": None},
        {"extra_args": {"other": 1}},
        {"output_kind": SimpleNamespace(name="DELTA")},
        {"logprobs": None},
        {"logprobs": 1},
        {"prompt_logprobs": 0},
        {"stop": ["\n"]},
    ],
)
def test_other_requests_get_every_token_at_once(change: dict[str, Any]) -> None:
    held, requests = HeldOutputs(), {"a": SimpleNamespace(sampling_params=params(**change))}
    for token in range(3):
        assert len(held.exchange([output("a", token)], requests, START)) == 1
    assert is_marked(params())


def test_an_end_without_a_token_brings_those_that_wait() -> None:
    held, requests = started("a")
    assert held.exchange([output("a", 1)], requests, START) == []
    ended = held.exchange([output("a", finish="error")], {}, START)
    assert read(ended) == [("a", [1], [-1.0], "error")]


def test_an_event_such_as_a_preemption_is_sent_at_once() -> None:
    held, requests = started("a")
    assert held.exchange([output("a", 1)], requests, START) == []
    sent = held.exchange([output("a", 2, events=["preempted"])], requests, START)
    assert read(sent) == [("a", [1, 2], [-1.0, -2.0], None)]
    assert sent[0].events == ["preempted"]


def test_an_aborted_request_is_forgotten() -> None:
    """A later request may have the same name. It starts with nothing held."""
    held, requests = started("a", "b")
    held.exchange([output("a", 1), output("b", 1)], requests, START)
    del requests["a"]
    held.exchange([output("b", 2)], requests, START + HOLD_S)
    requests["a"] = SimpleNamespace(sampling_params=params(extra_args=None))
    assert read(held.exchange([output("a", 7)], requests, START + HOLD_S)) == [("a", [7], [-7.0], None)]


def test_only_servers_of_runs_batch_their_outputs() -> None:
    assert VllmLauncher().environment(SPEC)[SWITCH] == "1"
    assert VllmLauncher().environment(PUBLIC)[SWITCH] == "0"


def test_an_untested_release_keeps_its_own_way() -> None:
    assert [bool(untested(version)) for version in ("0.26.0", "0.32.0+cpu", "0.33.0", "0.3.2")] == [
        False, False, True, True,
    ]  # fmt: skip
    assert untested(None) == ""
