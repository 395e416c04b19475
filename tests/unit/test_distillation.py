"""Distillation: a teacher's logprobs as advantages, adapters as teachers, an average that resumes exactly."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from pydantic import ValidationError
from transformers import AutoModelForCausalLM

from skylite.algorithms.distillation import OnPolicyDistillation
from skylite.algorithms.losses import BatchSize, LossInputs
from skylite.config.algorithm import AlgorithmConfig, ImportanceConfig
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.data.chat_tokenizer_in_sandbox import Job
from skylite.environments.teacher_prompts import contexts_of, with_teacher_prompts
from skylite.errors import DataError, RunFailed
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.policy import TEACHER, Policy, load_policy, role_params, score
from skylite.model.process_group import Dist
from skylite.rollout.prompt_check import check_teacher_prompts
from skylite.run.rollout_file import examples_of, read_examples, write_rollouts
from skylite.run.run_dir import RunDir
from skylite.trainer.micro_batches import arrange
from skylite.trainer.precompute import teacher_logprobs
from skylite.trainer.step import train_step
from skylite.trainer.trainer import Trainer, make_algorithm, make_trainer
from skylite.types import Call, Group, Message, Prompt, Trajectory
from tests.cases import PROBE, flat_gradient, plain_model, policy_of, relative_difference, table_of
from tests.decisions import resolved
from tests.reference import reference_logprobs, reference_loss
from tests.rows import VOCAB, Row, groups_of, random_samples
from tests.small_run import settings

AVERAGE = {"name": "opd", "teacher": "ema", "teacher_update_rate": 0.25, "reward_weight": 1.0}


def distil(old: list[float], teacher: list[float], rewards: list[float], **algorithm: Any) -> Any:
    """Loss, slopes by logprob and metrics of four tokens with weight 1 / 4, on-policy."""
    leaf = torch.tensor(old, requires_grad=True)
    x = LossInputs(
        policy_logprobs=leaf,
        old_logprobs=leaf.detach(),
        advantages=torch.tensor(rewards),
        segments=torch.tensor([0, 0, 1, 1]),
        num_segments=2,
        sampling_logprobs=leaf.detach(),
        teacher_logprobs=torch.tensor(teacher),
        entropies=torch.zeros(4),
        token_weights=torch.full((4,), 0.25),
        weights=torch.full((4,), 0.25),
        size=BatchSize(4, 2, 8),
    )
    config = AlgorithmConfig(name="opd", **algorithm)
    loss, sums = OnPolicyDistillation(config, ImportanceConfig()).loss(x)
    (slopes,) = torch.autograd.grad(loss, leaf)
    return loss.item(), slopes.tolist(), {name: float(value) for name, value in sums.items()}


def test_the_advantage_is_log_teacher_minus_log_policy() -> None:
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    loss, slopes, sums = distil([half, half, quarter, half], [quarter, half, half, half], [9.0] * 4)
    assert slopes == pytest.approx([math.log(2) / 4, 0, -math.log(2) / 4, 0])  # -A / 4
    assert loss == pytest.approx(0)
    assert sums["teacher/kl"] == pytest.approx(0)  # log 2 - log 2
    assert sums["teacher/overlap"] == pytest.approx(1 / 2 + 1 + 1 + 1)


def test_coefficient_and_reward_weight_mix_both_advantages() -> None:
    half, quarter = math.log(1 / 2), math.log(1 / 4)
    rewards = [1.0, 1.0, -1.0, -1.0]
    _, slopes, sums = distil(
        [half] * 4, [quarter, half, half, half], rewards, distill_coef=2.0, reward_weight=0.5
    )
    assert slopes == pytest.approx([-(0.5 - 2 * math.log(2)) / 4, -0.125, 0.125, 0.125])
    assert sums["teacher/kl"] == pytest.approx(math.log(2))


def other_adapter(model: Path, folder: Path) -> tuple[Path, Any]:
    """An adapter with modules and a rank of its own in a folder, and PEFT's model with it."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    lora = LoraConfig(task_type="CAUSAL_LM", r=3, lora_alpha=6, target_modules=["v_proj", "up_proj"])
    plain = PeftModel(base, lora).eval()
    generator = torch.Generator().manual_seed(5)
    for name, param in plain.named_parameters():
        if "lora_B" in name:
            param.data.normal_(std=0.1, generator=generator)
    plain.save_pretrained(folder)
    return folder, plain


def with_teacher(model: Path, folder: Path, config: TrainConfig, dist: Dist) -> Policy:
    where = resolved(model, model, identity={"teacher": folder})
    policy, _ = enable_shortcuts(load_policy(where, config, dist), PROBE)
    return policy


@pytest.mark.parametrize("budget", [4096, 40], ids=["one pass", "many passes"])
def test_an_adapter_teaches_as_peft_computes_it(
    budget: int, tiny_llama: Path, tmp_path: Path, dist: Dist
) -> None:
    folder, plain = other_adapter(tiny_llama, tmp_path / "teacher")
    config = settings(
        algorithm={"name": "opd", "teacher": str(folder)},
        rollout={"temperature": 0.8},
        trainer={"tokens_per_micro_batch": budget},
    )
    policy = with_teacher(tiny_llama, folder, config, dist)
    assert set(policy.model.peft_config) == {"default", "teacher"}
    rows = random_samples(0)
    trainer = make_trainer(policy, config, dist)
    before = {n: p.detach().clone() for n, p in policy.lora.items()}
    metrics = train_step(trainer, examples_of(groups_of(rows)), 1)
    for name, param in policy.lora.items():
        param.data.copy_(before[name])
    student = PeftModel(
        AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.float32, attn_implementation="eager"),
        LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=policy.target_modules),
    ).eval()
    for name, param in student.named_parameters():
        if param.requires_grad:
            param.data.copy_(policy.lora[name].data)
    with torch.no_grad():
        scored = [reference_logprobs(plain, row, 0.8) for row in rows]
        own = [reference_logprobs(student, row, 0.8) for row in rows]
    reference_loss(student, rows, range(len(rows)), config, teacher=scored).backward()
    assert relative_difference(trainer.optimizer.grads, flat_gradient(student, policy)) < 1e-5
    gap = torch.cat(own) - torch.cat(scored)
    assert metrics["teacher/kl"] == pytest.approx(float(gap.mean()), rel=1e-4)
    assert metrics["teacher/overlap"] == pytest.approx(float(torch.exp(-gap).clamp(max=1).mean()), rel=1e-4)
    assert metrics["time/teacher_s"] > 0


def test_the_base_as_teacher_adds_no_weights(tiny_llama: Path, dist: Dist) -> None:
    def names(config: TrainConfig) -> set[str]:
        return {n for n, _ in policy_of(tiny_llama, config, dist).model.named_parameters()}

    assert names(settings(algorithm={"name": "opd", "reward_weight": 1.0})) == names(settings())


def step(trainer: Trainer, number: int) -> None:
    trainer.learn(train_step(trainer, examples_of(groups_of(random_samples(number))), number))


def test_the_average_follows_the_policy_and_teaches(tiny_llama: Path, dist: Dist) -> None:
    config = settings(algorithm=AVERAGE)
    trainer = make_trainer(policy_of(tiny_llama, config, dist), config, dist)
    for name, param in trainer.average.items():
        param.data.copy_(trainer.policy.lora[name.replace(".teacher.", ".default.")])
    start = {n: p.detach().clone() for n, p in trainer.policy.lora.items()}
    step(trainer, 1)
    for (name, average), param in zip(trainer.average.items(), trainer.policy.lora.values(), strict=True):
        first = start[name.replace(".teacher.", ".default.")]
        assert torch.allclose(average, 0.75 * first + 0.25 * param, atol=1e-7)
    micro = trainer.pack(table_of(random_samples(2), config))[0][0]
    taught = teacher_logprobs(trainer.policy, micro, 1.0)
    for param, average in zip(trainer.policy.lora.values(), trainer.average.values(), strict=True):
        param.data.copy_(average)
    with torch.no_grad():
        assert torch.equal(taught, score(trainer.policy, micro.tokens, 1.0)[0])


def test_a_resumed_average_has_the_bits_of_a_straight_run(
    tiny_llama: Path, tmp_path: Path, dist: Dist
) -> None:
    config, run = settings(algorithm=AVERAGE), RunDir(tmp_path)
    run.checkpoints.mkdir()
    straight = make_trainer(policy_of(tiny_llama, config, dist), config, dist)
    step(straight, 1)
    straight.save(run, 1)
    step(straight, 2)
    again = make_trainer(policy_of(tiny_llama, config, dist), config, dist)
    assert again.load(run.checkpoint_path(1)) == 1
    step(again, 2)
    for left, right in zip(straight.average.values(), again.average.values(), strict=True):
        assert torch.equal(left, right)
    assert all(torch.equal(p, again.policy.lora[n]) for n, p in straight.policy.lora.items())
    assert not torch.equal(*(next(iter(x.values())) for x in (again.average, again.policy.lora)))
    assert role_params(again.policy, TEACHER).keys() == again.average.keys()


@pytest.mark.parametrize(
    ("sections", "sentence"),
    [
        ({"algorithm": {"name": "opd"}}, "teacher=base starts as the policy itself"),
        ({"algorithm": {"name": "opd", "teacher": "ema"}}, "teacher=ema starts as the policy itself"),
        ({"algorithm": {"teacher": "ema"}}, "teacher=ema has no effect with algorithm.name=grpo"),
        ({"algorithm": {"name": "sft", "distill_coef": 2.0}}, "distill_coef=2.0 has no effect"),
        (
            {"algorithm": {"name": "opd", "teacher": "x", "zero_std_groups": "drop"}},
            "zero_std_groups=drop has no effect with algorithm.reward_weight=0",
        ),
        (
            {"algorithm": {"name": "opd", "teacher": "x", "policy_loss": "kl_cov"}},
            "selects tokens by the advantage of the reward",
        ),
        (
            {
                "algorithm": {"name": "opd", "teacher": "x", "reward_weight": 1.0},
                "rollout": {"group_size": 1},
            },
            "leaves algorithm.name=opd nothing to compare",
        ),
        ({"algorithm": {"name": "opsd"}}, "teacher=base starts as the policy itself.*teacher_column"),
        ({"algorithm": {"name": "sdpo", "teacher_prompt": "{prompt}"}}, "teacher_prompt has no {context}"),
        ({"algorithm": {"name": "sdpo"}, "rollout": {"group_size": 1}}, "group_size=1 has none"),
        ({"algorithm": {"teacher_sees_feedback": True}}, "teacher_sees_feedback=True has no effect"),
    ],
)
def test_settings_without_an_effect_are_refused(sections: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        settings(**sections)
    assert settings(algorithm={"name": "opd", "teacher": "x"}, rollout={"group_size": 1})


def group_of(prompt: Prompt, texts: Sequence[str], rewards: Sequence[float], *said: str) -> Group:
    """Completions of a prompt of one token, with feedback."""
    calls = [
        Call(prompt_token_ids=[1], completion_token_ids=[2], sampling_logprobs=[-1.0], text=text)
        for text in texts
    ]
    rows = zip(calls, rewards, said or [""] * len(calls), strict=True)
    trajectories = tuple(Trajectory(calls=(c,), reward=r, feedback=f) for c, r, f in rows)
    return Group(prompt=prompt, trajectories=trajectories)


class Letters:
    """A tokenizer with a token for each letter of a text, and 7, 8, ... for chats, which it keeps."""

    def __init__(self) -> None:
        self.chats: list[list[str]] = []
        self.tokenizer = ChatTokenizer(run_jobs=self.run, stop_token_ids=())

    def run(self, jobs: Sequence[Job]) -> Any:
        return [{"ids": self._ids(job)} for job in jobs]

    def _ids(self, job: Job) -> list[int]:
        if "text" in job:
            return [3] * len(job["text"])
        self.chats.append([message["content"] for message in job["messages"]])
        return [6 + len(self.chats)]


def contexts(prompt: Prompt, rewards: Sequence[float], *said: str, **algorithm: Any) -> list[str]:
    """What the teachers of "wrong", "right" and "also right" see, in the form of a prompt of one's own."""
    config = AlgorithmConfig(teacher_prompt="{prompt} {context}", **algorithm)
    group = group_of(prompt, ["wrong", "right", "also right"], rewards, *said)
    return asyncio.run(contexts_of(group, config, Letters().tokenizer))


def row(**extra: Any) -> Prompt:
    messages = [Message(role="system", content="Be brief."), Message(role="user", content="2 + {context}?")]
    return Prompt(id="test/1", messages=messages, answer="4", source="", extra=extra)


def test_a_success_of_the_group_is_shown_to_the_others_teachers() -> None:
    assert contexts(row(), [0, 1, 1], name="sdpo") == ["right", "also right", "right"]
    assert contexts(row(), [0, 1, 0], name="sdpo") == ["right", "", "right"]  # not its own
    assert contexts(row(), [0, 0.5, 0], name="sdpo") == ["", "", ""]
    half = {"name": "sdpo", "success_reward": 0.5, "teacher_column": "hint"}
    assert contexts(row(hint="add"), [0, 0.5, 0], **half) == ["add\n\nright", "add", "add\n\nright"]
    assert contexts(row(), [0, 0, 0], name="opsd", teacher_column="answer") == ["4"] * 3


def test_feedback_is_shown_to_its_own_completions_teacher() -> None:
    both = {"name": "sdpo", "teacher_sees_feedback": True}
    shown = contexts(row(), [0, 1, 0], "3 is not 4", "", "too long", **both)
    assert shown == ["right\n\n3 is not 4", "", "right\n\ntoo long"], "the second has neither"
    alone = both | {"teacher_sees_success": False}
    assert contexts(row(), [0, 1, 0], "3 is not 4", "", "too long", **alone) == ["3 is not 4", "", "too long"]
    assert contexts(row(), [0, 1, 0], "3 is not 4", "", "too long", name="sdpo")[0] == "right", (
        "not asked for"
    )


def test_the_prompt_names_its_parts() -> None:
    letters, algorithm = Letters(), AlgorithmConfig(name="sdpo", teacher_sees_feedback=True)
    group = group_of(row(), ["right", "wrong", "right"], [1, 0, 1], "", "3 is not 4", "fine")
    taught = asyncio.run(with_teacher_prompts(group, algorithm, letters.tokenizer))
    assert [t.calls[0].teacher_prompt_token_ids for t in taught.trajectories] == [[7], [8], [9]]
    solution = "2 + {context}?\n\nA correct solution, for you alone:\n\nright"
    said = "Feedback on an earlier answer of yours:\n\n"
    end = "\n\nNow answer the question."
    assert letters.chats == [
        ["Be brief.", f"{solution}{end}"],
        ["Be brief.", f"{solution}\n\n{said}3 is not 4{end}"],
        ["Be brief.", f"{solution}\n\n{said}fine{end}"],
    ]


def test_the_teachers_prompt_must_fit_into_the_models_context(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"max_position_embeddings": 1024}', encoding="utf-8")
    algorithm = {"name": "sdpo", "teacher_sees_feedback": True, "max_feedback_tokens": 511}
    rollout = {"max_completion_tokens": 256}
    tokenizer = Letters().tokenizer  # a prompt is one token: 1 + 511 + 2 x 256
    check_teacher_prompts(tokenizer, settings(algorithm=algorithm, rollout=rollout), tmp_path, [row()])
    algorithm["max_feedback_tokens"] = 512
    with pytest.raises(DataError, match=r"tokens=512 and 2 .*max_completion_tokens=256 have 1,025 .* 1,024"):
        check_teacher_prompts(tokenizer, settings(algorithm=algorithm, rollout=rollout), tmp_path, [row()])
    episodes = settings(
        algorithm={"name": "opsd", "teacher_column": "answer"},
        env={"episode": "guess", "max_tokens": 1024},
        rollout={"max_prompt_tokens": 500},
    )
    with pytest.raises(DataError, match=r"prompt and 1 completions of env.max_tokens=1024 have 1,025 tokens"):
        check_teacher_prompts(tokenizer, episodes, tmp_path, [row()])


def test_a_feedback_over_its_limit_stops_the_run() -> None:
    at_limit = {"name": "sdpo", "teacher_sees_feedback": True, "max_feedback_tokens": 10}
    assert contexts(row(), [0, 0, 0], "3 is not 4", "", "", **at_limit) == ["3 is not 4", "", ""]
    with pytest.raises(RunFailed, match=r"prompt test/1 has 11 tokens, over .*max_feedback_tokens=10"):
        contexts(row(), [0, 0, 0], "3 is not 4!", "", "", **at_limit)


@pytest.mark.parametrize("extra", [{}, {"hint": " "}, {"hint": 4}])
def test_a_row_without_the_teachers_column_is_refused(extra: dict[str, Any]) -> None:
    with pytest.raises(DataError, match=r"Row test/1 has no text in the column 'hint'"):
        contexts(row(**extra), [0, 0, 0], name="opsd", teacher_column="hint")


def test_calls_get_their_teachers_prompts_rendered_once() -> None:
    letters, texts = Letters(), ["wrong", "right {prompt}", "wrong"]
    algorithm = AlgorithmConfig(name="sdpo", teacher_prompt="Q {prompt} S {context}")
    taught = asyncio.run(
        with_teacher_prompts(group_of(row(), texts, [0, 1, 0]), algorithm, letters.tokenizer)
    )
    assert [t.calls[0].teacher_prompt_token_ids for t in taught.trajectories] == [[7], [], [7]]
    assert letters.chats == [["Be brief.", "Q 2 + {context}? S right {prompt}"]]


def test_an_episode_with_an_untaught_call_is_left_out() -> None:
    rows = [
        Row(
            group=0,
            prompt_token_ids=[1],
            completion_token_ids=[2, 4],
            sampling_logprobs=[-1.0, -1.0],
            reward=0,
            calls=(([1], [2]), ([1, 2, 3], [4])),
        )
    ] * 3
    prompts = [([7], [7, 2, 3]), ([7], []), ([], [])]
    (group,) = groups_of(rows)
    trajectories = [
        replace(
            t,
            calls=tuple(
                replace(call, teacher_prompt_token_ids=ids) for call, ids in zip(t.calls, of_t, strict=True)
            ),
        )
        for t, of_t in zip(group.trajectories, prompts, strict=True)
    ]
    examples = examples_of([replace(group, trajectories=tuple(trajectories))])
    for weight, kept in ((0.0, [True, False, False]), (1.0, [True] * 3)):
        config = settings(algorithm={"name": "sdpo", "reward_weight": weight})
        assert arrange(examples, make_algorithm(config), config).kept == kept


@pytest.mark.parametrize("budget", [4096, 60], ids=["one pass", "many passes"])
def test_the_base_with_more_in_its_prompt_teaches(
    budget: int, tiny_llama: Path, tmp_path: Path, dist: Dist
) -> None:
    algorithm = {"name": "opsd", "teacher_column": "answer"}
    config = settings(algorithm=algorithm, trainer={"tokens_per_micro_batch": budget})
    rows, rng = random_samples(0), random.Random(3)
    prompts = [[rng.randrange(VOCAB) for _ in range(15)] for _ in range(4)]
    # One completion in four has no teacher: it is in no sum and no denominator.
    groups = groups_of(rows)
    taught = [i for i in range(len(rows)) if i % 4 != 2]
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(
                    t, calls=(replace(t.calls[0], teacher_prompt_token_ids=[] if i == 2 else prompts[g]),)
                )
                for i, t in enumerate(group.trajectories)
            ),
        )
        for g, group in enumerate(groups)
    ]
    write_rollouts(tmp_path / "step.parquet", groups)
    policy = policy_of(tiny_llama, config, dist)
    trainer, plain = make_trainer(policy, config, dist), plain_model(tiny_llama, policy, config)
    metrics = train_step(trainer, read_examples(tmp_path / "step.parquet"), 1)
    with torch.no_grad(), plain.disable_adapter():
        scores = [
            reference_logprobs(plain, replace(rows[i], prompt_token_ids=prompts[i // 4]), 1.0) for i in taught
        ]
    kept = [rows[i] for i in taught]
    reference_loss(plain, kept, range(len(kept)), config, teacher=scores).backward()
    assert relative_difference(trainer.optimizer.grads, flat_gradient(plain, policy)) < 1e-5
    assert metrics["teacher/taught_frac"] == 1.0
    assert metrics["groups/left_out_frac"] == 0.25
    with torch.no_grad():
        own = torch.cat([reference_logprobs(plain, r, 1.0) for r in kept])
    assert metrics["teacher/kl"] == pytest.approx(float((own - torch.cat(scores)).mean()), rel=1e-4)


def test_tokens_without_a_teacher_learn_from_the_reward_alone() -> None:
    half = math.log(1 / 2)
    _, slopes, sums = distil([half] * 4, [math.nan, half, half, math.nan], [1.0] * 4, reward_weight=1.0)
    assert slopes == pytest.approx([-0.25] * 4)
    assert (sums["teacher/kl"], sums["teacher/overlap"], sums["teacher/taught_frac"]) == (0, 2, 2)
