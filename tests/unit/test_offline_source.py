"""Runs that learn from prepared chats or pairs: their tokens, their plan, their steps without an engine."""

from __future__ import annotations

import asyncio
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from skylite.config.train import TrainConfig
from skylite.engine.engine_pool import EnginePool
from skylite.environments.offline_source import Offline
from skylite.errors import DataError
from skylite.rollout.loop import run_steps
from skylite.rollout.plan import RunPlan, plan_run, write_run
from skylite.rollout.resume import plan_resume, recover_metrics
from skylite.rollout.session import Progress, Session
from skylite.rollout.sources import source_for
from skylite.run.metrics_file import held_out_scores, read_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir
from skylite.types import Message, Prompt
from skylite.ui.dashboard import Screen
from tests.logs import logged_messages
from tests.prepared import prepare
from tests.tiny_models import CHAT_TEMPLATE
from tests.unit.environment_cases import STOP, shared_tokenizer, to_ids, to_text
from tests.unit.run_cases import make_model
from tests.unit.simulated_run import fake_trainer

CHAT: list[Message] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "And 2 + 2?"},
    {"role": "assistant", "content": " 4 "},
]
THINKS = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] if loop.last else "
    "m['content'].split('</think>')[-1] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Drops reasoning from the history, as Qwen3 does."""


def offline(template: str = CHAT_TEMPLATE) -> Offline:
    return Offline(TrainConfig(), shared_tokenizer(template))


def learned(prompt: Prompt, template: str = CHAT_TEMPLATE) -> list[list[tuple[str, str]]]:
    """[trajectories][replies] the prompt's last 9 characters, and the reply."""
    (trajectories,) = offline(template).render([prompt])
    return [
        [(to_text(r.prompt_token_ids)[-9:], to_text(r.completion_token_ids)) for r in t] for t in trajectories
    ]


def chat_of(messages: list[Message]) -> Prompt:
    return Prompt(id="row", messages=messages, answer="", source="")


def pair_of(chosen: str, rejected: str) -> Prompt:
    replies = {"chosen": chosen, "rejected": rejected}
    return Prompt(id="row", messages=CHAT[:4], answer="", source="", extra=replies)


def test_every_reply_of_a_chat_is_learned_with_its_end_and_nothing_else() -> None:
    (trajectories,) = offline().render([chat_of(CHAT)])
    ((first, second),) = trajectories
    assert [to_text(r.completion_token_ids) for r in (first, second)] == ["2<|im_end|>", " 4 <|im_end|>"]
    whole = to_ids("".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in CHAT))
    both = second.prompt_token_ids + second.completion_token_ids
    assert whole[: len(both)] == both
    start = first.prompt_token_ids + first.completion_token_ids
    assert second.prompt_token_ids[: len(start)] == start, "the tree computes a chat once"
    assert first.completion_token_ids[-1] == second.completion_token_ids[-1] == STOP


def test_only_the_last_replies_of_a_pair_are_learned() -> None:
    assert learned(pair_of("4", "five")) == [
        [("ssistant\n", "4<|im_end|>")],
        [("ssistant\n", "five<|im_end|>")],
    ]


def test_a_template_that_drops_reasoning_from_the_history_shows_it_in_its_own_call() -> None:
    chat = [*CHAT[:2], {"role": "assistant", "content": "<think>hm</think>2"}, *CHAT[3:]]
    (trajectories,) = offline(THINKS).render([chat_of(chat)])  # type: ignore[arg-type]
    first, second = trajectories[0]
    assert to_text(first.completion_token_ids) == "<think>hm</think>2<|im_end|>"
    assert "hm" not in to_text(second.prompt_token_ids)


def test_a_template_that_ends_no_turn_gets_the_end_of_turn_token() -> None:
    plain = "{% for m in messages %}{{ m['content'] }}\n{% endfor %}"
    assert learned(chat_of(CHAT[1:3]), plain) == [[("1 + 1?\n", "2<|im_end|>")]]


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | upper"), None),
        (CHAT_TEMPLATE.replace("message['content']", "message['content'] | replace('2', 'two')"), "text of"),
        ("{{ messages | length }}" + CHAT_TEMPLATE, "right after its prompt"),
    ],
    ids=["same letters", "other text", "other beginning"],
)
def test_replies_that_a_template_does_not_show_are_refused(template: str, reason: str | None) -> None:
    if reason is None:
        assert learned(chat_of(CHAT[1:3]), template) == [[("ssistant\n", "2<|im_end|>")]]
        return
    with pytest.raises(DataError, match=rf"replies of row row exactly: .*{reason}"):
        learned(chat_of(CHAT[1:3]), template)


def rows(folder: Path, algorithm: str) -> Path:
    """Prepared data with 12 training rows."""
    chats = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"It is {n}."}]
             for n in range(14)]  # fmt: skip
    lines: list[dict[str, Any]] = [{"messages": chat} for chat in chats]
    if algorithm == "dpo":
        lines = [{"prompt": f"{n}?", "chosen": f"It is {n}.", "rejected": "No."} for n in range(14)]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return prepare(str(path), out=folder / "data", sft=algorithm == "sft", pairs=algorithm == "dpo", limit=12)


def plan_of(folder: Path, algorithm: str, data: Path | None = None, **sections: Any) -> RunPlan:
    if not (folder / "model").exists():
        make_model(folder / "model")
    config = TrainConfig.model_validate(
        {
            "num_steps": 3,
            "algorithm": {"name": algorithm},
            "model": {"name": str(folder / "model")},
            "data": {"path": str(data or rows(folder, algorithm)), **sections.pop("data_section", {})},
            "rollout": {"prompts_per_step": 2, **sections.pop("rollout", {})},
            **sections,
        }
    )
    return plan_run(config, RunDir(folder / "run"))


@pytest.mark.parametrize("algorithm", ["sft", "dpo"])
def test_a_run_learns_from_its_rows_without_an_engine(tmp_path: Path, algorithm: str) -> None:
    plan = plan_of(tmp_path, algorithm, eval={"limit": 2, "every": 1, "split": "train"})
    assert (plan.config.engine.num_engines, len(plan.held_out)) == (0, 2)
    write_run(plan)
    console = Console(file=io.StringIO())
    session = Session(
        plan=plan,
        engines=EnginePool([], 0.1),
        source=Offline(plan.config, shared_tokenizer(CHAT_TEMPLATE)),
        progress=Progress(plan.run, 3, Screen(3, console), dict),
    )

    async def both() -> None:
        facts = {k: {"metrics": METRICS | {"eval/score": k / 4, "eval/loss": 3 - k}} for k in range(4)}
        trainer = asyncio.create_task(fake_trainer(plan.run, 1, 3, 0.0, facts))
        await run_steps(session)
        trainer.cancel()

    with logged_messages() as logged:
        asyncio.run(both())
    assert "step 3/3  loss 0.2500  train" in "\n".join(logged)
    assert "step 2: accuracy 50.0 %, loss 1 (2 rows)" in "\n".join(logged)
    assert held_out_scores(plan.run, plan.config.eval) == {0: 0, 1: 0.25, 2: 0.5, 3: 0.75}
    assert "equal" not in "\n".join(logged)
    metrics = read_metrics(plan.run.metrics_path)
    assert [m["step"] for m in metrics] == [1, 2, 3]
    assert not any(key.startswith(("reward/", "canary/", "staleness/")) for key in metrics[0])
    group = read_rollouts(plan.run.rollout_path(1))[0]
    assert [t.reward for t in group.trajectories] == ([1.0] if algorithm == "sft" else [1.0, 0.0])
    assert group.trajectories[0].calls[0].text == f"It is {group.prompt.messages[-1]['content'][:-1]}."
    assert [m["step"] for m in recover_metrics(plan.run, 0, 3)] == [1, 2, 3]


METRICS = {"loss/policy": 0.25, "time/canary_s": 0.01, "time/publish_s": 0.01, "time/train_s": 0.01}


def test_rows_over_the_limit_are_refused_or_left_out(tmp_path: Path) -> None:
    short = {"max_prompt_tokens": 20, "max_completion_tokens": 11}
    with pytest.raises(DataError, match=r"of 12 prompts have more than rollout\.max_prompt_tokens \+ "):
        plan_of(tmp_path, "sft", rollout=short)
    filtering = {"filter_overlong_prompts": True}
    left = plan_of(tmp_path, "sft", tmp_path / "data", rollout=short, data_section=filtering)
    assert 2 <= len(left.train) < 12
    assert len(left.resolved.identity.dropped_prompts) == 12 - len(left.train)


def test_data_of_another_kind_is_refused(tmp_path: Path) -> None:
    data = rows(tmp_path, "sft")
    for algorithm in ("dpo", "grpo"):
        with pytest.raises(DataError, match=r"holds chats for algorithm\.name=sft"):
            plan_of(tmp_path, algorithm, data)


def test_a_resume_keeps_the_rows(tmp_path: Path) -> None:
    plan = plan_of(tmp_path, "dpo")
    write_run(plan)
    again = plan_resume(plan.run)
    assert [p.id for p in again.train] == [p.id for p in plan.train]
    assert source_for(again.config).read(again.config, "test")[0]


def test_settings_of_engines_and_episodes_do_not_fit() -> None:
    with pytest.raises(ValueError, match=r"algorithm\.name=sft learns from prepared rows"):
        TrainConfig.model_validate({"algorithm": {"name": "sft"}, "env": {"episode": "guess"}})
    with pytest.raises(ValueError, match=r"engine\.num_engines=0 leaves algorithm\.name=grpo nothing"):
        TrainConfig.model_validate({"engine": {"num_engines": 0}})
