"""Several policies on one base: each gets the bits that it gets alone, the base is there once, and a removed
policy leaves no memory."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, ModelError
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.policy import load_policy
from skylite.model.process_group import Dist
from skylite.processes.hardware import Dtype
from skylite.run.rollout_file import examples_of
from skylite.run.run_dir import RunDir
from skylite.trainer.canary import canary_logprobs, check_reference
from skylite.trainer.publish_adapter import adapter_tensors
from skylite.trainer.shared_base import SharedBase, load_shared_base
from skylite.trainer.step import train_step
from skylite.trainer.trainer import Trainer, make_trainer
from tests.cases import PROBE
from tests.decisions import resolved
from tests.rows import groups_of, random_samples
from tests.small_run import settings
from tests.tiny_models import make_tiny_model

EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]


def configs() -> dict[str, TrainConfig]:
    """Ranks, alphas, targets, rates, seeds and algorithms that differ."""
    few = ["q_proj", "v_proj", "down_proj"]
    return {
        "all": settings(seed=1, lora={"rank": 8, "alpha": 4}),
        "few": settings(seed=2, lora={"rank": 3, "target_modules": few, "dropout": 0.2}, optim={"lr": 1e-2}),
        "ppo": settings(seed=3, algorithm={"name": "ppo"}, critic={"rank": 2, "target_modules": ["o_proj"]}),
        "head": settings(seed=1, lora={"target_modules": ["lm_head", "up_proj"]}, algorithm={"kl_coef": 0.1}),
        "xavier": settings(seed=4, lora={"init": "xavier", "dropout": 0.1, "dropout_position": "after"}),
    }


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose values fit into bfloat16, so that the base is stored in it."""
    folder = make_tiny_model(tmp_path_factory.mktemp("narrow") / "model")
    AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).float().save_pretrained(folder)
    return folder


def train(trainer: Trainer, step: int) -> dict[str, float]:
    return train_step(trainer, examples_of(groups_of(random_samples(step, num_groups=2))), step)


def with_settings(config: TrainConfig, **trainer: Any) -> TrainConfig:
    return settings(**(config.model_dump(exclude_unset=True) | {"trainer": {"num_threads": 1} | trainer}))


def results(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Copies of all parameters and moments, by names that do not depend on the policy's place."""
    found = {}
    for name, optimizer in trainer.optimizers.items():
        for key, param in optimizer.params.items():
            found[f"{name}/{key}"] = param.detach().clone()
            for moment, value in optimizer.adamw.state[param].items():
                found[f"{name}/{key}/{moment}"] = value.clone()
    return found


def alone(model: Path, config: TrainConfig, dist: Dist, dtype: Dtype) -> tuple[Any, Any]:
    """Parameters, moments and metrics of two steps of a lone run, and its canary."""
    where = resolved(model, model, placement={"dtype": dtype})
    policy, _ = enable_shortcuts(load_policy(where, config, dist), PROBE)
    trainer = make_trainer(policy, config, dist)
    metrics = [train(trainer, step) for step in (1, 2)]
    return results(trainer), (metrics, canary_logprobs(policy, [PROBE]))


@pytest.mark.parametrize(
    ("dtype", "checkpointing"), [("float32", "selective"), ("float32", "full"), ("bfloat16", "selective")]
)
def test_policies_trained_in_turn_have_the_bits_of_each_alone(
    dtype: Dtype, checkpointing: str, narrow: Path, dist: Dist
) -> None:
    base = {"tokens_per_micro_batch": 100, "checkpointing": checkpointing}
    names = [*configs()] if (dtype, checkpointing) == ("float32", "selective") else ["few", "ppo", "all"]
    wanted = {name: with_settings(configs()[name], **base) for name in names}
    where = resolved(narrow, narrow, placement={"dtype": dtype})
    shared = load_shared_base(where, wanted["few"], PROBE, dist)
    assert any("stored in bfloat16" in choice for choice in shared.choices) == (dtype == "float32")
    trainers = {name: shared.add_policy(name, config) for name, config in wanted.items() if name != "ppo"}
    metrics: dict[str, list[dict[str, float]]] = {name: [] for name in wanted}
    for name in trainers:
        metrics[name].append(train(trainers[name], 1))
    trainers["ppo"] = shared.add_policy("ppo", wanted["ppo"])  # later, beside trained ones
    metrics["ppo"].append(train(trainers["ppo"], 1))
    for name in reversed(wanted):
        metrics[name].append(train(trainers[name], 2))
    for name, config in wanted.items():
        parameters, (expected, canary) = alone(narrow, config, dist, dtype)
        found = results(trainers[name])
        assert found.keys() == parameters.keys()
        differing = [key for key, value in parameters.items() if not torch.equal(value, found[key])]
        assert not differing, f"{name}: {differing[:3]}"
        assert metrics[name] == expected, name
        assert canary_logprobs(trainers[name].policy, [PROBE]) == canary, name


def test_the_base_is_there_once_and_a_removed_policy_leaves_nothing(narrow: Path, dist: Dist) -> None:
    shared = load_shared_base(resolved(narrow, narrow), configs()["all"], PROBE, dist)
    count = lambda: sum(p.numel() for p in shared.base.model.parameters())  # noqa: E731
    size_of_base, wanted = count(), configs()
    for name, config in wanted.items():
        train(shared.add_policy(name, config), 1)
    own = {n: sum(x.grads.numel() for x in t.optimizers.values()) for n, t in shared.trainers.items()}
    critic = shared.trainers["ppo"].critic
    assert critic is not None
    values = sum(p.numel() for p in critic.head.parameters())  # the value head is beside the model
    del critic
    assert count() == size_of_base + sum(own.values()) - values
    assert size_of_base == sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(narrow).parameters())

    kept = results(shared.trainers["all"])
    for name in ("few", "ppo", "head", "xavier"):
        optimizers = shared.trainers[name].optimizers.values()
        tensors = [weakref.ref(p) for x in optimizers for p in [*x.params.values(), x.grads]]
        tensors += [weakref.ref(m) for x in optimizers for s in x.adamw.state.values() for m in s.values()]
        del optimizers
        shared.remove_policy(name)
        gc.collect()
        assert not [t for t in tensors if t() is not None], name
    assert count() == size_of_base + own["all"]
    assert all(torch.equal(value, kept[key]) for key, value in results(shared.trainers["all"]).items())
    train(shared.trainers["all"], 2)
    shared.remove_policy("all")
    again = shared.add_policy("all", wanted["all"])  # on a base that has no policy
    for step in (1, 2):
        train(again, step)
    parameters, _ = alone(narrow, wanted["all"], dist, "float32")
    assert all(torch.equal(value, parameters[key]) for key, value in results(again).items())


def test_the_policy_that_computed_last_goes_on_when_another_leaves(narrow: Path, dist: Dist) -> None:
    wanted = configs()["all"]
    shared = load_shared_base(resolved(narrow, narrow), wanted, PROBE, dist)
    shared.add_policy("leaves", configs()["few"])
    stays = shared.add_policy("stays", wanted)
    train(stays, 1)
    shared.remove_policy("leaves")
    train(stays, 2)
    parameters, _ = alone(narrow, wanted, dist, "float32")
    assert all(torch.equal(value, parameters[key]) for key, value in results(stays).items())
    shared.remove_policy("stays")
    comes = shared.add_policy("comes", wanted)  # under PEFT's name of one that left
    for step in (1, 2):
        train(comes, step)
    assert all(torch.equal(value, parameters[key]) for key, value in results(comes).items())


def test_files_of_a_policy_fit_a_lone_run(narrow: Path, tmp_path: Path, dist: Dist) -> None:
    """Checkpoints and adapters do not tell where the policy was trained; a warm start gives its bits."""
    config = configs()["few"]
    shared = load_shared_base(resolved(narrow, narrow), config, PROBE, dist)
    shared.add_policy("first", configs()["all"])
    trainer = shared.add_policy("second", config)
    train(trainer, 1)
    run = RunDir(tmp_path)
    run.checkpoints.mkdir()
    trainer.save(run, 1)
    lone = make_trainer(load_policy(resolved(narrow, narrow), config, dist), config, dist)
    assert lone.load(run.checkpoint_path(1)) == 1
    assert all(map(torch.equal, lone.policy.lora.values(), trainer.policy.lora.values()))
    assert adapter_tensors(lone.policy).keys() == adapter_tensors(trainer.policy).keys()
    third = shared.add_policy("third", configs()["all"])
    assert third.load(saved(shared.trainers["first"], tmp_path / "other")) == 1


def saved(trainer: Trainer, folder: Path) -> Path:
    run = RunDir(folder)
    run.checkpoints.mkdir(parents=True)
    trainer.save(run, 1)
    return run.checkpoint_path(1)


@contextmanager
def one_policy(model: Path, config: TrainConfig, dist: Dist) -> Iterator[SharedBase]:
    shared = load_shared_base(resolved(model, model), config, PROBE, dist)
    shared.add_policy("a", config)
    yield shared


def test_names_are_checked(narrow: Path, dist: Dist) -> None:
    with one_policy(narrow, settings(), dist) as shared:
        with pytest.raises(ConfigError, match=r"already has a policy 'a'.*Choose another name"):
            shared.add_policy("a", settings())
        with pytest.raises(ConfigError, match=r"no policy 'b'.*Its policies: a\."):
            shared.remove_policy("b")
        with pytest.raises(ModelError, match="nothing_such"):
            shared.add_policy("c", settings(lora={"target_modules": ["nothing_such"]}))
        assert list(shared.trainers) == ["a"]
        assert len(shared.base.model.peft_config) == 1


def test_a_kl_to_the_start_is_that_of_the_policy(narrow: Path, tmp_path: Path, dist: Dist) -> None:
    """Each policy's reference is its own start: the base, or the adapter it began with."""
    from tests.unit.test_optimizer import warm_settings

    with one_policy(narrow, settings(algorithm={"kl_coef": 0.1}), dist) as shared:
        train(shared.trainers["a"], 1)
        adapter = tmp_path / "adapter"
        adapter.mkdir()
        from safetensors.torch import save_file

        save_file(adapter_tensors(shared.trainers["a"].policy), adapter / "adapter_model.safetensors")
        warm = shared.add_policy("b", warm_settings(adapter, kl_coef=0.1), adapter)
        assert check_reference(warm.policy, [PROBE], must_agree=True) == 0.0
        moved = canary_logprobs(warm.policy, [PROBE])
        assert moved == canary_logprobs(shared.trainers["a"].policy, [PROBE])
        assert check_reference(shared.trainers["a"].policy, [PROBE], must_agree=False) > 0.0
        train(shared.trainers["a"], 2)
        assert canary_logprobs(warm.policy, [PROBE]) == moved


def test_experts_train_beside_each_other_and_others_are_refused(tmp_path: Path, dist: Dist) -> None:
    moe = make_tiny_model(tmp_path / "moe", "qwen3_moe")
    wanted = {n: settings(seed=n, lora={"rank": n, "target_parameters": EXPERTS}) for n in (2, 4)}
    shared = load_shared_base(resolved(moe, moe), wanted[2], PROBE, dist)
    trainers = [shared.add_policy(str(n), config) for n, config in wanted.items()]
    for step in (1, 2):
        for trainer in trainers:
            train(trainer, step)
    for trainer, config in zip(trainers, wanted.values(), strict=True):
        parameters, _ = alone(moe, config, dist, "float32")
        assert all(torch.equal(value, parameters[key]) for key, value in results(trainer).items())
    with pytest.raises(ModelError, match=r"cannot share a base.*Give all policies"):
        shared.add_policy("plain", settings())
