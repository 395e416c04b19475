"""What `train --dry-run` finds: data, templates, rewards, models and settings with which a run would fail."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
from datetime import datetime, tzinfo
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from skylite.adapters.target_modules import check_target_names
from skylite.cli.train import ready_text
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTemplate, ChatTokenizer, load_tokenizer, run_template
from skylite.data.prompts import PromptFileInfo, write_rows
from skylite.engine.model_limits import check_trainable
from skylite.engine.vllm.models import check_lora
from skylite.errors import ConfigError, DataError, ModelError
from skylite.rewards.worker_pool import RewardPool
from skylite.rollout.loop import EqualRewards
from skylite.rollout.plan import RunPlan, plan_run, write_run
from skylite.rollout.prompt_check import unopened_tag
from skylite.rollout.resume import plan_resume
from skylite.rollout.reward_check import blind_rewards
from skylite.run.run_dir import RunDir
from skylite.types import Call, Group, Prompt, Trajectory
from tests.tiny_models import CHAT_TEMPLATE
from tests.unit.data_cases import prompt

USER = [{"role": "user", "content": "3 + 4?"}]
DATED = "{%- set today = strftime_now('%d %b %Y %H:%M:%S') %}Today: {{ today }}\n" + CHAT_TEMPLATE
NO_SYSTEM = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    + CHAT_TEMPLATE
)
THINKING = CHAT_TEMPLATE.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")


def write_data(folder: Path, prompts: list[Prompt]) -> Path:
    info = PromptFileInfo(
        dataset="t", source_kind="generated", source="t", source_sha256="0", count=len(prompts), seed=0,
        split="train", reward="math", system="", few_shot=[],
    )  # fmt: skip
    write_rows(folder / "train.parquet", prompts, info)
    return folder


def plan(root: Path, model: Path, prompts: list[Prompt] | None = None, **sections: Any) -> RunPlan:
    data = write_data(root / "data", prompts or [prompt()])
    tree = {
        "model": {"name": str(model)}, "data": {"path": str(data)}, "eval": {"limit": 0}, "num_steps": 2,
        "rollout": {"prompts_per_step": 1},
    }  # fmt: skip
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values} if isinstance(values, dict) else values  # type: ignore[dict-item]
    return plan_run(TrainConfig.model_validate(tree), RunDir(root / "run"))


def with_template(tiny_llama: Path, folder: Path, template: str | list[dict[str, str]]) -> Path:
    """The tiny model with another template, or with named ones."""
    shutil.copytree(tiny_llama, folder)
    path = folder / "tokenizer_config.json"
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


# Prompts


def test_long_prompts_are_counted_and_a_setting_leaves_them_out_on_a_resume_too(
    tmp_path: Path, tiny_llama: Path
) -> None:
    texts = ["x" * 400 if i % 10 == 3 else f"say {i}" for i in range(80)]
    rows = [
        prompt(id=f"t/train/{i}", messages=[{"role": "user", "content": text}])
        for i, text in enumerate(texts)
    ]
    limit = {"max_prompt_tokens": 128}
    with pytest.raises(DataError, match=r"8 of 80 prompts .*128 tokens.*filter_overlong_prompts=true"):
        plan(tmp_path, tiny_llama, rows, rollout=limit)
    kept = plan(tmp_path, tiny_llama, rows, rollout=limit, data={"filter_overlong_prompts": True})
    ids = [p.id for p, text in zip(rows, texts, strict=True) if len(text) < 400]
    assert [p.id for p in kept.train] == ids
    write_run(kept)
    assert [p.id for p in plan_resume(kept.run).train] == ids


def test_a_limit_counts_what_the_template_adds(tmp_path: Path, tiny_llama: Path) -> None:
    """One token a byte: the text has 100, the template adds 20 and more."""
    rows = [prompt(), prompt(id="t/train/1", messages=[{"role": "user", "content": "y" * 100}])]
    with contextlib.closing(load_tokenizer(tiny_llama)) as tokenizer:
        longest = len(tokenizer.encode_chats([rows[1].messages])[0])
    assert longest > 110
    plan(tmp_path, tiny_llama, rows, rollout={"max_prompt_tokens": longest})
    with pytest.raises(DataError, match=f"1 of 2 prompts .*t/train/1.* has {longest}"):
        plan(tmp_path, tiny_llama, rows, rollout={"max_prompt_tokens": longest - 1})


def test_templates_that_cannot_render_the_prompts_are_refused(tmp_path: Path, tiny_llama: Path) -> None:
    named = [{"name": "tool_use", "template": "TOOLS " + CHAT_TEMPLATE}, {"name": "rag", "template": "RAG"}]
    default = [{"name": "default", "template": CHAT_TEMPLATE}, named[0]]
    plan(tmp_path / "a", with_template(tiny_llama, tmp_path / "default", default))
    with pytest.raises(ModelError, match="template"):
        plan(tmp_path / "b", with_template(tiny_llama, tmp_path / "named", named))
    strict = with_template(tiny_llama, tmp_path / "strict", NO_SYSTEM)
    plan(tmp_path / "c", strict)
    system = prompt(id="t/train/1", messages=[{"role": "system", "content": "Be brief."}, *USER])
    with pytest.raises(ModelError, match=r"refuses a system message.*--system ''"):
        plan(tmp_path / "d", strict, [prompt(), system])


def test_a_model_without_an_end_token_is_refused(tmp_path: Path, tiny_llama: Path) -> None:
    model = shutil.copytree(tiny_llama, tmp_path / "no_eos")
    for name, key in (("tokenizer_config.json", "eos_token"), ("generation_config.json", "eos_token_id"),
                      ("config.json", "eos_token_id")):  # fmt: skip
        values = json.loads((model / name).read_text())
        values.pop(key, None)
        (model / name).write_text(json.dumps(values))
    with pytest.raises(ModelError, match="defines no end-of-turn token"):
        plan(tmp_path, model)


# Time


def text_of(tokenizer: ChatTokenizer, ids: list[int]) -> str:
    """The tiny tokenizer has a token for each byte, in the order of its alphabet."""
    (job,) = tokenizer.run_jobs([{"decode": ids}])
    return str(job["text"])


def test_a_template_that_writes_the_time_sees_the_start_of_the_run(tmp_path: Path, tiny_llama: Path) -> None:
    model = with_template(tiny_llama, tmp_path / "dated", DATED)
    moment = datetime(2026, 1, 2, 3, 4, 5)
    with contextlib.closing(load_tokenizer(model, ChatTemplate(now=moment))) as tokenizer:
        chat = tokenizer.encode_chats([USER])[0]  # type: ignore[list-item]
        (job,) = tokenizer.run_jobs([{"messages": USER, "tools": None, "arguments": {}}])
        (facts,) = tokenizer.run_jobs([{"facts": {}}])
        assert text_of(tokenizer, chat).startswith("Today: 02 Jan 2026 03:04:05\n")
        assert job["ids"] == chat
        assert "strftime_now" in facts["template"]


class Clock2001(datetime):
    @classmethod
    def now(cls, tz: tzinfo | None = None) -> Clock2001:
        return cls(2001, 2, 3, 16, 5, 6, 7, tz)


def test_a_resume_at_another_time_of_day_renders_the_tokens_of_the_start(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run starts in 2001 by its clock; everything after it has the real one."""
    model = with_template(tiny_llama, tmp_path / "dated", DATED)
    with monkeypatch.context() as patch:
        patch.setattr("skylite.rollout.plan.datetime", Clock2001)
        begun = plan(tmp_path, model)
        quiet = plan(tmp_path / "other", tiny_llama)
    (note,) = (str(note) for note in begun.resolved.notes if "writes the time" in str(note))
    assert "2001-02-03 16:05:06" in note
    write_run(begun)
    assert '"template_time": "2001-02-03T16:05:06"' in begun.run.config_path.read_text()
    again = plan_resume(begun.run).run_config
    texts = []
    for template in (ChatTemplate(now=Clock2001.now()), run_template(again), ChatTemplate()):
        with contextlib.closing(load_tokenizer(model, template)) as tokenizer:
            texts.append(text_of(tokenizer, tokenizer.encode_chats([USER])[0]))  # type: ignore[list-item]
    assert texts[0].startswith("Today: 03 Feb 2001 16:05:06\n")
    assert texts[1] == texts[0] != texts[2]

    assert quiet.resolved.model.template_time is None
    assert not any("writes the time" in str(note) for note in quiet.resolved.notes)


# Rewards

OWN = """
def breaks(completion):
    return len(completion.split("<answer>")[1])

def none(completion, answer):
    return 1.0 if answer in completion else None

def infinite(completion):
    return 1.0 if completion else float("inf")

def fine(completion, answer):
    return float(answer in completion)

def wants_tag(completion):
    return 1.0 if completion.startswith("<think>") else 0.0
"""


@pytest.mark.parametrize(
    ("name", "words"), [("breaks", "IndexError"), ("none", "returned None"), ("infinite", "finite")]
)
def test_a_reward_that_fails_on_a_wrong_or_empty_completion_is_refused(
    name: str, words: str, tmp_path: Path, tiny_llama: Path
) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    functions = {"functions": [f"{tmp_path}/mine.py:{name}"]}
    with pytest.raises(ConfigError, match=words):
        plan(tmp_path, tiny_llama, reward=functions)


WANTS_TAG = "warning: the chat template opens <think> at the end of every prompt, so the reward {} gives"


def warned(plan: RunPlan, text: str) -> bool:
    return any(str(note).startswith(text) for note in plan.resolved.notes)


def test_a_run_warns_of_a_reward_that_wants_the_tag_that_its_prompts_open(
    tmp_path: Path, tiny_llama: Path
) -> None:
    """Only of such a reward, and only in front of such prompts; reward.prefill mends it."""
    (tmp_path / "mine.py").write_text(OWN)
    spec = f"{tmp_path}/mine.py:wants_tag"
    model = with_template(tiny_llama, tmp_path / "thinks", THINKING)
    both = plan(tmp_path / "a", model, reward={"functions": ["math", spec]})
    assert warned(both, WANTS_TAG.format("wants_tag"))
    prefilled = plan(tmp_path / "c", model, reward={"functions": [spec], "prefill": "<think>\n"})
    fair = plan(tmp_path / "d", model, reward={"functions": ["math", f"{tmp_path}/mine.py:fine"]})
    elsewhere = plan(tmp_path / "e", tiny_llama, reward={"functions": [spec]})
    assert not any(warned(p, "warning: the chat template opens") for p in (prefilled, fair, elsewhere))

    for prefill, reward in (("", 0.0), ("<think>\n", 1.0)):
        pool = RewardPool([spec], prefill=prefill)
        with contextlib.closing(pool):
            (score,) = asyncio.run(pool.score([(prompt(), "1 + 1 = 2\n</think>")]))
        assert score.reward == reward


def test_a_reward_is_blind_to_tags_that_are_special_tokens(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(OWN)
    specs = [*(f"{tmp_path}/mine.py:{name}" for name in ("wants_tag", "fine")), "regex", "length", "gsm8k"]
    pattern = r"(?s)</think>\s*<answer>.+</answer>"
    config = TrainConfig.model_validate({"reward": {"pattern": pattern, "min_length": 40}})

    def blind(hidden: tuple[str, ...]) -> list[str]:
        return blind_rewards(specs, config, [prompt()], {}, "", "<think>", hidden)

    assert blind(("<think>", "</think>")) == ["wants_tag", "regex"]
    assert blind(("<think>",)) == ["wants_tag"]


def sampled(*completions: tuple[str, float]) -> list[Group]:
    trajectories = (
        Trajectory(
            calls=(Call(prompt_token_ids=[1], completion_token_ids=[2], sampling_logprobs=[], text=text),),
            reward=reward,
        )
        for text, reward in completions
    )
    return [Group(prompt=prompt(), trajectories=tuple(trajectories))]


CLOSED = "so 7\n</think>\n7"


@pytest.mark.parametrize(
    ("groups", "prefill", "warns"),
    [
        (sampled((CLOSED, 0.0), ("and", 0.0)), "", True),
        (sampled((CLOSED.replace("think", "thinking"), -1.0), ("and", -1.0)), "", True),
        (sampled((CLOSED, 0.0), ("and", 0.0)), "<think>\n", False),
        (sampled((CLOSED, 0.0), (f"<think>{CLOSED}", 0.0)), "", False),
        (sampled((CLOSED, 0.0), ("and", 0.1)), "", False),
        (sampled((CLOSED, 1.0), ("and", 1.0)), "", False),
        (sampled((CLOSED, math.nan), ("and", math.nan)), "", False),
        (sampled(("7", 0.0), ("and", 0.0)), "", False),
        ([], "", False),
    ],
)
def test_a_first_step_without_rewards_warns_of_tags_that_are_only_closed(
    groups: list[Group], prefill: str, *, warns: bool
) -> None:
    assert bool(unopened_tag(groups, prefill)) == warns


def test_steps_of_equal_rewards_are_warned_of_once_and_then_at_each_doubling() -> None:
    equal = EqualRewards()
    shares = [1.0, 1.0, 0.5, *[1.0] * 12, 0.9, 1.0]
    warned = [
        bool(equal.after({"groups/zero_std_sampled_frac": share, "reward/mean": 0.0})) for share in shares
    ]
    assert [i for i, w in enumerate(warned) if w] == [5, 8, 14]


# Models


def config_only(folder: Path, **config: Any) -> Path:
    """A folder with config.json and two small matrices."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | config))
    names = ("model.layers.0.self_attn.q_proj", "model.embed_tokens")
    tensors = {f"{name}.weight": np.zeros((2, 2), np.float32) for name in names}
    save_file(tensors, folder / "model.safetensors")
    return folder


def judge(model: Path, device: str = "cpu") -> None:
    """The checks of a plan."""
    check_trainable(model)
    check_lora(model, device, LoraConfig())


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bnb8": (
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "bitsandbytes"}},
        r"quantised \(bitsandbytes\) in 8 bits, whose products round activations",
    ),
    "fp8": (
        {"architectures": ["LlamaForCausalLM"], "quantization_config": {"quant_method": "fp8"}},
        r"quantised \(fp8\): config.json says so, and its files hold no quantised matrix",
    ),
    "compressed": (
        {"architectures": ["LlamaForCausalLM"], "compression_config": {"format": "int"}},
        "quantization_config is not complete",
    ),
    "audio": (
        {"architectures": ["SomeForConditionalGeneration"], "audio_config": {"x": 1}},
        "lead to none in vLLM.*leave out their LoRA",
    ),
    "jamba": (
        {"architectures": ["JambaForCausalLM"], "layer_types": ["mamba", "attention"]},
        "on a CPU vLLM .* ends with the tiny model of the sweep: .*selective_scan_fwd",
    ),
    "bailing": ({"architectures": ["BailingMoeForCausalLM"], "num_experts": 4}, "mixture of experts"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_models_that_cannot_train_on_a_cpu_are_refused_with_the_reason(name: str, tmp_path: Path) -> None:
    config, words = REFUSED[name]
    with pytest.raises(ModelError, match=f"(?s){words}"):
        judge(config_only(tmp_path / name, **config))


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["SmolLM3ForCausalLM"], "layer_types": ["full_attention"]},
        {"architectures": ["GraniteForCausalLM"]},
        {"architectures": ["Olmo3ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
        {"architectures": ["Gemma4ForCausalLM"], "layer_types": ["sliding_attention", "full_attention"]},
        {"architectures": ["LlamaForCausalLM"], "quantization_config": None},
        {"architectures": ["GraniteMoeHybridForCausalLM"], "layer_types": ["attention"]},
        {"architectures": ["Lfm2ForCausalLM"], "layer_types": ["conv", "full_attention"]},
        {"architectures": ["Qwen3_5ForCausalLM"], "layer_types": ["linear_attention", "full_attention"]},
    ],
)
def test_models_that_train_are_accepted(
    config: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    judge(config_only(tmp_path / "model", **config))


@pytest.mark.parametrize(
    ("targets", "words"),
    [
        (["q_proj", "k_prj"], r"'k_prj'.*Did you mean 'k_proj'"),
        (["nope"], r"'nope'.*Its modules are .*k_proj"),
        (["query_key_value"], r"'query_key_value'.*q_proj"),
        ([r"model\.layers\.9\..*"], "matches no module"),
        ([], "leaves no module"),
    ],
)
def test_a_target_that_matches_nothing_is_refused_with_the_closest_name(
    targets: list[str], words: str, tiny_llama: Path
) -> None:
    with pytest.raises(ModelError, match=f"(?s){words}"):
        check_target_names(tiny_llama, LoraConfig(target_modules=targets))


def test_targets_that_match_are_accepted_and_an_unused_exclusion_is_said(tiny_llama: Path) -> None:
    for targets in (
        ["q_proj", "self_attn.k_proj"],
        [r".*\.mlp\..*_proj"],
        ["q_proj", "lm_head"],
        "all-linear",
    ):
        assert check_target_names(tiny_llama, LoraConfig.model_validate({"target_modules": targets})) == []
    (note,) = check_target_names(tiny_llama, LoraConfig(exclude_modules=["up_proj", "dwn_proj", "lm_head"]))
    assert note.is_warning
    assert "'dwn_proj'" in note.text
    with pytest.raises(ModelError, match="leaves no module"):
        check_target_names(tiny_llama, LoraConfig(exclude_modules=[".*"]))


# Folders and rates


def test_a_folder_that_holds_a_run_is_refused_before_the_start(tmp_path: Path, tiny_llama: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"holds a run already.*--resume"):
        plan(tmp_path, tiny_llama)
    sync = tmp_path / "sync"
    (sync / "policy-v000003").mkdir(parents=True)
    shutil.rmtree(tmp_path / "run")
    with pytest.raises(ConfigError, match="adapters of another run"):
        plan(tmp_path, tiny_llama, lora={"lora_sync_path": str(sync)})


def test_the_verdict_counts_warnings_such_as_an_unusual_rate(tmp_path: Path, tiny_llama: Path) -> None:
    usual, high = (plan(tmp_path / str(lr), tiny_llama, optim={"lr": lr}) for lr in (1e-4, 0.1))
    assert [n for n in map(str, high.resolved.notes) if "optim.lr=0.1 is over" in n]
    counts = [sum(n.is_warning for n in p.resolved.notes) for p in (usual, high)]
    assert counts[1] == counts[0] + 1
    assert ready_text(high).startswith(f"ready, with {counts[1]} warning(s)")
