"""skylite and TRL's GRPOTrainer compute the same weights, losses and gradients from the same tensors."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from skylite.config.train import TrainConfig
from skylite.environments.single_turn import overlong_penalty
from skylite.trainer.micro_batches import pack
from skylite.trainer.precompute import credit, loss_inputs
from skylite.trainer.trainer import make_algorithm
from tests.cases import table_of
from tests.unit.peer_cases import (
    ALONE,
    GROUP,
    SHAPES,
    TOLERANCE,
    Case,
    Result,
    assert_same_result,
    make_case,
    ours,
    result_of,
    samples_of,
    shape_id,
)
from tests.unit.peer_code import load_trl
from tests.unit.trl_trainer import trl_trainer


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    return load_trl()


@pytest.fixture(params=SHAPES, ids=shape_id)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(*request.param)


def trl_loss(
    trl: SimpleNamespace, case: Case, ratio: Tensor | None = None, **settings: Any
) -> tuple[Result, dict[str, list[float]]]:
    """GRPOTrainer._compute_loss on our tensors, and its logged metrics."""
    trainer = trl_trainer(trl, **settings)
    policy, entropies = case.policy.clone().requires_grad_(), case.entropies.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (policy, entropies, None)
    ids = torch.zeros(case.mask.shape, dtype=torch.int64)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1] + 1,
        "completion_ids": ids,
        "completion_mask": case.mask.long(),
        "advantages": case.advantages,
        "old_per_token_logps": case.old,
        "ref_per_token_logps": case.ref,
        "num_items_in_batch": case.mask.sum(),
        "importance_sampling_ratio": ratio,
        "sampling_per_token_logps": case.rollout,
    }
    return result_of(trainer._compute_loss(trainer.model, inputs), policy, entropies), trainer._metrics[
        "train"
    ]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ({"aggregation": "seq-mean-token-mean"}, {"loss_type": "grpo"}),
        ({"name": "bnpo"}, {"loss_type": "bnpo"}),
        ({"name": "dr_grpo"}, {"loss_type": "dr_grpo"}),
        ({"name": "dapo"}, {"loss_type": "dapo", "epsilon_high": 0.28}),
        ({"name": "cispo"}, {"loss_type": "cispo", "epsilon_high": 5.0}),
        ({"name": "cispo", "clip_eps_high": 0.5}, {"loss_type": "cispo", "epsilon_high": 1.5}),
        ({"name": "sapo"}, {"loss_type": "sapo"}),
        (
            {"name": "sapo", "sapo_tau_pos": 0.5, "sapo_tau_neg": 3.0},
            {"loss_type": "sapo", "args": {"sapo_temperature_pos": 0.5, "sapo_temperature_neg": 3.0}},
        ),
        (
            {"name": "gspo"},
            {
                "loss_type": "grpo",
                "importance_sampling_level": "sequence",
                "epsilon_low": 3e-4,
                "epsilon_high": 4e-4,
            },
        ),
        (
            {"name": "gspo", "clip_eps_low": 0.2, "clip_eps_high": 0.2},
            {"loss_type": "grpo", "importance_sampling_level": "sequence"},
        ),
        ({"policy_loss": "dual_clip", "dual_clip": 1.5}, {"loss_type": "bnpo", "args": {"delta": 1.5}}),
        (
            {"aggregation": "seq-mean-token-sum", "policy_loss": "gspo"},
            {"loss_type": "luspo", "importance_sampling_level": "sequence"},
        ),
    ],
    ids=lambda x: "-".join(map(str, x.values())),
)
def test_trl_losses(trl, case, algorithm, settings):
    if settings["loss_type"] == "luspo":  # here TRL broadcasts one loss per completion over its mask
        case = replace(case, mask=torch.ones_like(case.mask))
    theirs, _ = trl_loss(trl, case, **settings)
    assert_same_result(ours(case, **algorithm), theirs, case.mask)


def test_trl_vespo(trl, case):
    case = replace(case, old=case.rollout)
    theirs, _ = trl_loss(trl, case, loss_type="vespo", args={"vespo_k_pos": 1.5, "vespo_lambda_neg": 0.7})
    assert_same_result(ours(case, name="vespo", vespo_k_pos=1.5, vespo_lambda_neg=0.7), theirs, case.mask)


@pytest.mark.parametrize("limit", [0.01, 0.1, 0.3])
def test_trl_leaves_out_what_the_policy_left_behind(trl, case, limit):
    theirs, _ = trl_loss(trl, case, loss_type="bnpo", off_policy_mask_threshold=limit)
    mine = ours(case, {"mode": "none", "off_policy_kl": limit})
    assert_same_result(mine, theirs, case.mask)
    plain = ours(case, {"mode": "none"})
    left = (mine.by_policy == 0) & (plain.by_policy != 0)
    assert mine.sums["mismatch/off_policy_frac"] >= left.sum()


@pytest.mark.parametrize(("level", "loss"), [("token", "clip"), ("sequence", "gspo")])
def test_trl_bias_corrected_kl(trl, case, level, loss):
    args = {"use_bias_correction_kl": True}
    settings = {"loss_type": "grpo", "beta": 0.3, "importance_sampling_level": level}
    theirs, _ = trl_loss(trl, case, args=args, **settings)
    mine = ours(
        case,
        policy_loss=loss,
        kl_coef=0.3,
        kl_bias_correction=True,
        aggregation="seq-mean-token-mean",
    )
    assert_same_result(mine, theirs, case.mask)


@pytest.mark.parametrize("aggregation", ["seq-mean-token-mean", "token-mean"])
def test_trl_kl_in_the_loss(trl, case, aggregation):
    loss_type = {"seq-mean-token-mean": "grpo", "token-mean": "bnpo"}[aggregation]
    theirs, logged = trl_loss(trl, case, loss_type=loss_type, beta=0.3)
    mine = ours(case, kl_coef=0.3, kl_estimator="k3", aggregation=aggregation)
    assert_same_result(mine, theirs, case.mask)
    assert float(mine.sums["policy/kl_ref"] / case.mask.sum()) == pytest.approx(
        logged["kl"][0], rel=TOLERANCE
    )


def test_trl_entropy_bonus_and_clipped_tokens(trl, case):
    theirs, logged = trl_loss(trl, case, loss_type="bnpo", entropy_coef=0.2, _entropy_bonus_enabled=True)
    mine = ours(case, entropy_coef=0.2)
    assert_same_result(mine, theirs, case.mask)
    assert mine.by_entropies.abs().min() > 0
    num_tokens = int(case.mask.sum())
    assert float(mine.sums["policy/entropy"] / num_tokens) == pytest.approx(
        logged["entropy"][0], rel=TOLERANCE
    )
    assert float(mine.sums["policy/clipped_frac"] / num_tokens) == pytest.approx(
        logged["clip_ratio/region_mean"][0], rel=TOLERANCE
    )


@pytest.mark.parametrize("quantile", [0.8, 0.2, 0.05])
def test_trl_only_top_entropy_tokens_get_the_policy_loss(trl, case, quantile):
    theirs, _ = trl_loss(trl, case, loss_type="bnpo", beta=0.1, top_entropy_quantile=quantile)
    assert_same_result(ours(case, kl_coef=0.1, top_entropy_quantile=quantile), theirs, case.mask)


def test_trl_overlong_punishment(trl):
    for longest, buffer in ((100, 20), (64, 16), (50, 50), (10, 1)):
        theirs = trl.overlong(longest, buffer)([[0] * n for n in range(longest + 5)])
        assert [overlong_penalty(n, longest, buffer / longest) for n in range(longest + 5)] == pytest.approx(
            theirs, abs=1e-12
        )


def trl_step(trl: SimpleNamespace, case: Case, patch: pytest.MonkeyPatch, **settings: Any) -> dict[str, Any]:
    """GRPOTrainer._generate_and_score_completions on our completions, logprobs and rewards.

    Returns the inputs of its loss. Token ids: 0 is padding, 1 is EOS. Completions of odd length have no EOS.
    """
    patch.setattr(trl.trainer, "gather_object", lambda x: x)
    aggregation = settings.pop("multi_objective_aggregation", "sum_then_normalize")
    rewards = case.components if aggregation == "normalize_then_sum" else case.rewards[:, None]
    completions = [[7] * (n - 1) + [7 if n % 2 else 1] for n in case.lengths.tolist()]
    logprobs = [row[keep].tolist() for row, keep in zip(case.rollout, case.mask, strict=True)]
    trainer = trl_trainer(
        trl,
        environment_factories=None,
        environments=None,
        tools=None,
        _tokenizer=SimpleNamespace(pad_token_id=0),
        eos_token_ids=[1],
        pad_to_multiple_of=None,
        use_vllm=True,
        vllm_importance_sampling_correction=True,
        num_iterations=1,
        num_generations=GROUP,
        args={
            "per_device_train_batch_size": 1,
            "gradient_accumulation_steps": 1,
            "gradient_checkpointing_kwargs": None,
        },
        multi_objective_aggregation=aggregation,
        reward_weights=torch.ones(rewards.shape[1], dtype=rewards.dtype),
        reward_func_names=["score", "long"][: rewards.shape[1]],
        reward_funcs=[None] * rewards.shape[1],
        _pending_extra_logs={},
        _pending_metrics={},
        _logs=defaultdict(list, {"rewards": defaultdict(list)}),
        log_multimodal=False,
        **settings,
    )
    trainer._generate = lambda prompts: (
        [[5]] * len(prompts),
        completions,
        None,
        [""] * len(prompts),
        logprobs,
        {},
        None,
        None,
    )
    trainer._calculate_rewards = lambda *_: rewards
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (case.old, None, None)
    inputs: dict[str, Any] = trainer._generate_and_score_completions([{"prompt": ""}] * len(case.mask))
    return inputs


@pytest.mark.parametrize(
    ("level", "mode"), [(a, b) for a in ("token", "sequence") for b in ("truncate", "mask")]
)
def test_trl_importance_weights_in_the_loss(trl, case, monkeypatch, level, mode):
    low, cap = (0.5, 1.5) if level == "token" else (0.1, 3.0)
    floor = low if mode == "mask" else None
    inputs = trl_step(
        trl,
        case,
        monkeypatch,
        mask_truncated_completions=False,
        scale_rewards="none",
        vllm_importance_sampling_mode=f"{level}_{mode}",
        vllm_importance_sampling_clip_min=floor,
        vllm_importance_sampling_clip_max=cap,
    )
    case = replace(case, advantages=inputs["advantages"])
    ratio = inputs["importance_sampling_ratio"]
    theirs, _ = trl_loss(
        trl, case, ratio, loss_type="bnpo", use_vllm=True, vllm_importance_sampling_correction=True
    )
    weights = {"level": level, "mode": mode, "cap": cap, "floor": floor or 0.0}
    assert_same_result(ours(case, weights), theirs, case.mask)


@pytest.mark.parametrize("mask_truncated", [False, True])
def test_trl_from_rewards_to_gradients(trl, monkeypatch, mask_truncated):
    """A full step in float32: groups, advantages, weights, loss. Ours has several micro-batches."""
    case = make_case(12, 33, 7, torch.float32)
    inputs = trl_step(
        trl,
        case,
        monkeypatch,
        mask_truncated_completions=mask_truncated,
        scale_rewards="none",
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=2.0,
    )
    trainer = trl_trainer(trl, loss_type="dapo", use_vllm=True, vllm_importance_sampling_correction=True)
    leaf = case.policy.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, case.entropies, None)
    theirs = result_of(
        trainer._compute_loss(trainer.model, inputs), leaf, case.entropies.clone().requires_grad_()
    )

    config = TrainConfig.model_validate(
        {
            "algorithm": {"advantage": "dr_grpo", "mask_truncated": mask_truncated},
            "trainer": {"tokens_per_micro_batch": 64},
        }
    )
    table, algorithm = table_of(samples_of(case), config), make_algorithm(config)
    policy: Any = SimpleNamespace(packing="padded", device=torch.device("cpu"), images=None)
    (micro_batches,) = pack(table, algorithm, policy, config, ALONE)
    assert len(micro_batches) >= 2
    loss, grads = torch.tensor(0.0), torch.zeros_like(case.policy)
    for micro in credit(table, micro_batches, algorithm, ALONE):
        numbers = micro.numbers
        logprobs = torch.cat([case.policy[n][case.mask[n]] for n in numbers]).requires_grad_()
        old = torch.cat([case.old[n][case.mask[n]] for n in numbers])
        x = loss_inputs(replace(micro, old_logprobs=old), logprobs, torch.zeros_like(logprobs))
        part, _ = algorithm.loss(x)
        (slopes,) = torch.autograd.grad(part, logprobs)
        loss += part.detach()
        for n, grad in zip(numbers, torch.split(slopes, case.lengths[numbers].tolist()), strict=True):
            grads[n, : len(grad)] = grad
    assert_same_result(
        Result(loss, grads[case.mask], torch.zeros(int(case.mask.sum())), {}), theirs, case.mask
    )
