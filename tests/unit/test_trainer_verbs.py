"""The verbs on a real model: losses, logprobs, gradients and updates equal to plain torch's."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from skylite.config.loading import read_run_config
from skylite.errors import ConfigError
from skylite.model.policy import score
from skylite.model.process_group import Dist
from skylite.processes.frames import decode_frame, encode_frame, receive_frame, send_frame
from skylite.run.run_dir import AdapterVersion, adapter_name
from skylite.trainer import verbs
from skylite.trainer.policies import Policies, load_policies
from skylite.trainer.service_worker import carried_out
from skylite.verbs import Datum
from tests.cases import PROBE, plain_model, relative_difference
from tests.small_run import make_run, settings

SETTINGS = {
    "ppo": {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1},
    "cispo": {"clip_low_threshold": 0.5, "clip_high_threshold": 1.5},
    "dro": {"beta": 0.2},
}


@pytest.fixture(scope="module")
def policies(tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory, dist: Dist) -> Policies:
    """Passes of at most 24 tokens, so each request takes several."""
    config = settings(trainer={"tokens_per_micro_batch": 24})
    run = make_run(tmp_path_factory.mktemp("service") / "run", tiny_llama, config, {})
    return load_policies(run, read_run_config(run.config_path), [PROBE], dist)


def add(policies: Policies, name: str, **lora: Any) -> None:
    """A policy whose B is not zero, so that A has a gradient, too."""
    policies.add(name, lora, seed=7)
    generator = torch.Generator().manual_seed(3)
    for key, param in policies.base.trainers[name].policy.lora.items():
        if "lora_B" in key:
            param.data.copy_(torch.randn(param.shape, generator=generator) * 0.05)


def data_of(loss: str, width: int = 1) -> list[Datum]:
    """Three sequences, the first two with a common prefix; some targets are not the next token."""
    rng = np.random.default_rng(5)
    data = []
    for length, common in ((9, 5), (11, 5), (14, 0)):
        ids = rng.integers(1, 250, length)
        ids[:common] = np.arange(40, 40 + common)
        size = length * width
        targets = rng.integers(1, 250, size) if width > 1 else np.append(ids[1:], 77)
        targets[2] = 8
        weights = {"weights": rng.normal(size=size).astype(np.float32)}
        sampled = {
            "logprobs": (-6 + rng.normal(size=size) * 0.3).astype(np.float32),
            "advantages": rng.normal(size=size).astype(np.float32),
        }
        inputs = weights if loss == "cross_entropy" else sampled
        data.append(Datum(token_ids=ids, targets=targets, width=width, inputs=inputs))
    return data


def reference(model: Any, data: list[Datum], loss: str, numbers: Mapping[str, float]) -> tuple[Any, Any, Any]:
    """Logprobs, the loss and the gradient of all LoRA parameters, one sequence at a time."""
    logprobs, total = [], torch.zeros(())
    for datum in data:
        table = torch.log_softmax(model(input_ids=torch.tensor(datum.token_ids[None])).logits[0].float(), 1)
        targets = torch.tensor(datum.targets).view(-1, datum.width)
        logprob = table.gather(1, targets).flatten()
        logprobs.append(logprob.detach().numpy())
        x = {key: torch.tensor(value) for key, value in datum.inputs.items()}
        if loss == "cross_entropy":
            total = total - (x["weights"] * logprob).sum()
            continue
        log_ratio, advantage = logprob - x["logprobs"], x["advantages"]
        ratio = log_ratio.exp()
        if loss == "importance_sampling":
            terms = ratio * advantage
        elif loss == "dro":
            terms = logprob * advantage - numbers["beta"] / 2 * log_ratio**2
        else:
            clipped = ratio.clamp(numbers["clip_low_threshold"], numbers["clip_high_threshold"])
            terms = (
                torch.min(ratio * advantage, clipped * advantage)
                if loss == "ppo"
                else clipped.detach() * logprob * advantage
            )
        total = total - terms.sum()
    params = [p for _, p in sorted(model.named_parameters()) if p.requires_grad]
    gradient = torch.cat([g.flatten() for g in torch.autograd.grad(total, params)])
    return logprobs, float(total.detach()), gradient


@pytest.mark.parametrize(
    ("loss", "width"),
    [(name, 1) for name in ("cross_entropy", "importance_sampling", "ppo", "cispo", "dro")]
    + [("cross_entropy", 3)],
)
def test_losses_and_gradients_equal_plain_torch(policies: Policies, tiny_llama: Path, loss: str, width: int):
    name, data, numbers = f"{loss}-{width}", data_of(loss, width), SETTINGS.get(loss, {})
    add(policies, name)
    trainer = policies.base.trainers[name]
    logprobs, total, gradient = reference(
        plain_model(tiny_llama, trainer.policy, trainer.config), data, loss, numbers
    )
    messages = [datum.to_message() for datum in data]
    only = policies.forward_backward(name, messages, loss, numbers, backward=False)
    assert not trainer.optimizer.grads.any()
    got = policies.forward_backward(name, messages, loss, numbers, backward=True)
    assert got["loss"] == pytest.approx(total, rel=1e-5)
    assert only["loss"] == pytest.approx(total, rel=1e-5)
    for mine, expected in zip(got["logprobs"], logprobs, strict=True):
        assert mine == pytest.approx(expected, abs=1e-5)
    assert relative_difference(trainer.optimizer.grads, gradient) < 1e-5
    policies.forward_backward(name, messages, loss, numbers, backward=True)  # a second one is added
    assert relative_difference(trainer.optimizer.grads, 2 * gradient) < 1e-5
    policies.remove(name)


def test_updates_equal_torchs_adamw_with_its_clipping(policies: Policies):
    add(policies, "adam")
    trainer = policies.base.trainers["adam"]
    mine = {name: p.detach().clone().requires_grad_() for name, p in trainer.policy.lora.items()}
    adamw = torch.optim.AdamW(mine.values(), lr=0.01, betas=(0.8, 0.7), eps=1e-6, weight_decay=0.1)
    params = {"learning_rate": 0.01, "beta1": 0.8, "beta2": 0.7, "eps": 1e-6, "weight_decay": 0.1}
    messages = [datum.to_message() for datum in data_of("cross_entropy")]
    for clip in (0.0, 0.5):
        policies.forward_backward("adam", messages, "cross_entropy", {}, backward=True)
        for copy, param in zip(mine.values(), trainer.policy.lora.values(), strict=True):
            assert param.grad is not None
            copy.grad = param.grad.clone()
        norm = torch.nn.utils.clip_grad_norm_(mine.values(), clip or 1e9)
        adamw.step()
        assert policies.optim_step("adam", params | {"grad_clip_norm": clip}) == pytest.approx(float(norm))
        assert not trainer.optimizer.grads.any()
        for name, param in trainer.policy.lora.items():
            assert torch.allclose(param, mine[name], atol=1e-6), name
    policies.remove("adam")


def test_a_gradient_that_is_not_finite_is_refused_and_forgotten(policies: Policies):
    add(policies, "nan")
    trainer = policies.base.trainers["nan"]
    before = {name: param.detach().clone() for name, param in trainer.policy.lora.items()}
    trainer.optimizer.grads[0] = float("nan")
    with pytest.raises(ConfigError, match="not finite"):
        policies.optim_step("nan", {})
    assert not trainer.optimizer.grads.any()
    assert all(torch.equal(param, before[name]) for name, param in trainer.policy.lora.items())
    policies.remove("nan")


def test_a_state_comes_back_with_its_moments_or_fresh_ones(policies: Policies, tmp_path: Path):
    messages = [datum.to_message() for datum in data_of("cross_entropy")]

    def train(name: str) -> dict[str, torch.Tensor]:
        policies.forward_backward(name, messages, "cross_entropy", {}, backward=True)
        policies.optim_step(name, {"learning_rate": 0.01})
        return {key: p.detach().clone() for key, p in policies.base.trainers[name].policy.lora.items()}

    for name in ("one", "same", "fresh"):
        add(policies, name)
    path = tmp_path / "one" / "step-000000"
    train("one")
    policies.save("one", str(path))
    expected = train("one")
    for name in ("same", "fresh"):
        policies.forward_backward(name, messages, "cross_entropy", {}, backward=True)  # is forgotten
        policies.load(name, str(path), optimizer=name == "same")
    again, other = train("same"), train("fresh")
    assert all(torch.equal(again[key], value) for key, value in expected.items())
    assert any(not torch.equal(other[key], value) for key, value in expected.items())
    policies.save("one", str(path))  # in place of the old one
    policies.load("fresh", str(path), optimizer=True)
    final = policies.base.trainers["fresh"].policy.lora
    assert all(torch.equal(final[key], value) for key, value in expected.items())
    assert [p.name for p in path.parent.iterdir()] == ["step-000000"]
    for name in ("one", "same", "fresh"):
        policies.remove(name)


def test_an_adapter_is_published_with_its_own_rank(policies: Policies):
    policies.add("small", {"rank": 2, "target_modules": ["q_proj"]}, seed=1)
    policies.publish("small", 41)
    folder = policies.run_config.resolved.identity.lora_sync_path / adapter_name(41)
    text = (AdapterVersion(41, folder).path / "adapter_config.json").read_text()
    assert '"r": 2' in text
    assert "q_proj" in text
    assert "down_proj" not in text
    policies.remove("small")


def test_commands_are_refused_in_a_sentence(policies: Policies):
    refused = carried_out(policies, {"verb": "optim_step", "policy": "nobody", "params": {}})
    assert "no policy 'nobody'" in refused["refused"]
    assert "done" in carried_out(policies, {"verb": "add", "policy": "a", "lora": {}, "seed": 1})
    twice = carried_out(policies, {"verb": "add", "policy": "a", "lora": {}, "seed": 1})
    assert "already" in twice["refused"]
    assert carried_out(policies, {"verb": "remove", "policy": "a"}) == {"done": None}


@pytest.fixture
def no_memory() -> Exception:
    """What torch's allocator raises here."""
    with pytest.raises(RuntimeError, match="can't allocate memory") as failed:
        torch.empty(1 << 52)
    return failed.value


@pytest.mark.parametrize("gpu", [False, True])
def test_out_of_memory_drops_the_request_alone(
    policies: Policies, monkeypatch: pytest.MonkeyPatch, no_memory: Exception, gpu: bool
):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.") if gpu else no_memory
    data = {"data": [d.to_message() for d in data_of("cross_entropy")], "loss": "cross_entropy"}
    verb = {"verb": "forward_backward", **data, "settings": {}, "backward": True}
    update = {"verb": "optim_step", "params": {"learning_rate": 0.01}}

    def bits(name: str) -> list[Any]:
        scored = carried_out(policies, {**verb, "policy": name})["done"]
        norm = carried_out(policies, {**update, "policy": name})["done"]
        weights = [p.detach().clone() for p in policies.base.trainers[name].policy.lora.values()]
        return [scored["loss"], norm, torch.cat([w.flatten() for w in weights]).tolist()]

    for name in ("alone", "unlucky", "other"):
        add(policies, name)
    expected = bits("alone")
    gradient = policies.base.trainers["unlucky"].optimizer.grads
    passes = iter([False, True])  # the first pass of the request has added its gradient

    def failing(*words: Any, **options: Any) -> Any:
        if next(passes):
            assert gradient.any()
            raise error
        return score(*words, **options)

    with monkeypatch.context() as faulty:
        faulty.setattr(verbs, "score", failing)
        reply = carried_out(policies, {**verb, "policy": "unlucky"})
    assert "The trainer ran out of memory on this request" in reply["refused"]
    assert not gradient.any()
    assert bits("other") == expected
    assert bits("unlucky") == expected
    for name in ("alone", "unlucky", "other"):
        policies.remove(name)


def test_a_policy_that_does_not_fit_leaves_nothing(
    policies: Policies, monkeypatch: pytest.MonkeyPatch, no_memory: Exception
):
    def failing(*_: Any) -> None:
        raise no_memory

    adding = {"verb": "add", "lora": {}, "seed": 1}
    for place in ("policy.fuse_lora_layers", "policy.move_adapters"):
        with monkeypatch.context() as faulty:
            faulty.setattr(f"skylite.model.{place}", failing)
            reply = carried_out(policies, {**adding, "policy": place})
        assert "ran out of memory" in reply["refused"]
        assert policies.base.trainers == policies.base.base.model.peft_config == {}
    assert carried_out(policies, {**adding, "policy": "fits"}) == {"done": None}
    assert len(policies.base.base.model.peft_config) == 1
    policies.remove("fits")


def test_another_error_ends_the_trainer(policies: Policies, monkeypatch: pytest.MonkeyPatch):
    def failing(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(Policies, "remove", failing)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        carried_out(policies, {"verb": "remove", "policy": "a"})


def test_frames_carry_arrays_and_nothing_that_runs():
    message = {
        "verb": "x",
        "data": [{"ids": np.arange(3), "w": np.ones(2, np.float32)}, {"ids": np.zeros(0, np.int64)}],
    }
    ours, theirs = socket.socketpair()
    sender = threading.Thread(target=send_frame, args=(ours, message))
    sender.start()
    got = receive_frame(theirs)
    sender.join()
    ours.close()
    assert got is not None
    assert got["data"][0]["ids"].tolist() == [0, 1, 2]
    assert got["data"][0]["w"].dtype == np.float32
    assert len(got["data"][1]["ids"]) == 0
    assert receive_frame(theirs) is None
    with pytest.raises(TypeError, match="a message holds no set"):
        encode_frame({"x": {1}})
    with pytest.raises(ValueError, match="no array of object"):
        decode_frame(b'{"x": {"array": ["object", 1]}}', bytes(8))
