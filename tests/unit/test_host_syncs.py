"""A micro-batch never waits for the GPU: no value and no shape of its work depends on a tensor's content.

Meta tensors stand in for a GPU's: they have shapes and no values. So an operation that needs a value, such as
.item(), .cpu() or an index by a mask, raises. Attention takes the path of GPUs.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM

from skylite.config.train import TrainConfig
from skylite.model.attention_backends import implementation, register_backends
from skylite.model.chunked_logprobs import HEAD_CHUNK_ELEMENTS
from skylite.model.fused_ops import RMS_NORM_GAINS, fuse_mlps, fuse_norms
from skylite.model.lora_linear import fuse_lora_layers
from skylite.model.packing import PackedTokens, pack_tokens
from skylite.model.policy import CRITIC, POLICY, Policy, adapter_params
from skylite.trainer.critic import Critic, ValueHead
from skylite.trainer.metrics import MetricSums
from skylite.trainer.micro_batches import MicroBatch
from skylite.trainer.precompute_logprobs import Precomputed
from skylite.trainer.step import _forward_backward_micro, critic_forward_backward
from tests.small_run import settings
from tests.tiny_models import tiny_config

META = torch.device("meta")
ALGORITHMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "kl and entropy": {"algorithm": {"kl_coef": 0.1, "entropy_coef": 0.01}},
    "gspo, rejected sequences": {
        "algorithm": {"name": "gspo"},
        "importance": {"level": "sequence", "reject_kl": 0.5},
    },
    "dual clip, masked tokens": {
        "algorithm": {"policy_loss": "dual_clip"},
        "importance": {"mode": "mask", "cap": 2.0, "floor": 0.3},
    },
}


class Copies(TorchDispatchMode):
    """Lists copies between devices, in both directions: without pinned memory each waits for the GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, out)) if isinstance(x, Tensor) and x.dim()}
        if len(devices) > 1:
            self.found.append(str(func))
        return out


def to_meta(model: nn.Module) -> None:
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                meta = torch.empty_like(param, device=META)
                module._parameters[name] = nn.Parameter(meta, requires_grad=param.requires_grad)
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else torch.empty_like(buffer, device=META)


def tiny_policy(dtype: torch.dtype, family: str = "llama") -> Policy:
    register_backends()
    base = AutoModelForCausalLM.from_config(tiny_config(family), dtype=dtype)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"])
    model = get_peft_model(base, lora, adapter_name=POLICY)
    model.add_adapter(CRITIC, lora)
    model.eval()
    for name, param in model.named_parameters():
        param.requires_grad_(".lora_" in name)
    fuse_lora_layers(model)
    fuse_norms(model, RMS_NORM_GAINS["weight"], recompute=True)
    fuse_mlps(model, recompute=True)
    base.set_attn_implementation(implementation("sdpa"))
    to_meta(model)
    return Policy(
        model=model,
        lora=adapter_params(model, POLICY),
        target_modules=["q_proj", "v_proj"],
        dtype=torch.float32,
        packing="tree",
        lm_head=base.get_output_embeddings(),
        checkpointing="selective",
        device=META,
    )


def meta_tokens() -> PackedTokens:
    prompts = [[1, 2, 3], [1, 2, 3], [1, 5], [1, 5]]
    completions = [[4, 5, 6], [4, 7], [8, 9, 2, 2], [8]]
    return pack_tokens(prompts, completions, [0, 0, 1, 1], "tree", META)


def meta_micro_batch() -> MicroBatch:
    tokens = meta_tokens()
    floats = torch.empty(len(tokens.rows), device=META)
    return MicroBatch(
        trajectories=[],
        numbers=[0, 1, 2, 3],
        tokens=tokens,
        keys=torch.empty_like(tokens.rows),
        token_weights=floats,
        num_update_tokens=10,
        sampling_logprobs=floats,
    )


@pytest.fixture(autouse=True)
def like_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Meta tensors have no entry in the tables of devices, and no autocast."""
    monkeypatch.setitem(HEAD_CHUNK_ELEMENTS, "meta", 1000)
    for module in ("lora_linear", "lm_head"):
        monkeypatch.setattr(f"skylite.model.{module}.compute_dtype", lambda x: x.dtype)
    for module in ("fused_ops", "chunked_logprobs"):
        monkeypatch.setattr(f"skylite.model.{module}.row_dot", torch.linalg.vecdot)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_micro_batch_never_waits(name: str, dtype: torch.dtype, family: str):
    config, policy, micro = settings(**ALGORITHMS[name]), tiny_policy(dtype, family), meta_micro_batch()
    known, advantages = Precomputed(), torch.empty_like(micro.token_weights)
    choice, sums = (micro.token_weights, None), MetricSums()
    with Copies() as copies:
        for _ in range(2):
            _forward_backward_micro(policy, micro, known, advantages, choice, config, sums)
    assert all(p.grad is not None for p in policy.lora.values())
    assert sums.worst is not None
    assert {x.device for x in [*sums.sums.values(), sums.worst]} == {META}
    assert copies.found == []


def test_the_critics_pass_never_waits():
    config = TrainConfig.model_validate({"algorithm": {"name": "ppo"}})
    policy, micro, head, sums = tiny_policy(torch.float32), meta_micro_batch(), ValueHead(64), MetricSums()
    to_meta(head)
    optimizer: Any = SimpleNamespace(grads=torch.zeros(1, device=META))
    values, returns = (torch.empty_like(micro.token_weights) for _ in range(2))
    critic = Critic(head=head, optimizer=optimizer, config=config.critic)
    with Copies() as copies:
        critic_forward_backward(policy, critic, [micro], [Precomputed(values=values)], [returns], sums)
    assert head.weight.grad is not None
    assert {x.device for x in sums.sums.values()} == {META}
    assert copies.found == []


def test_the_tokens_of_a_micro_batch_are_uploaded_in_one_piece():
    with Copies() as copies:
        meta_tokens()
    assert copies.found == ["aten._to_copy.default"]


@pytest.mark.parametrize(
    "waits", [lambda x: x.sum().item(), lambda x: x.tolist(), lambda x: x.cpu(), lambda x: x[x > 0]]
)
def test_meta_tensors_notice_a_wait(waits: Any):
    with pytest.raises((RuntimeError, NotImplementedError)):
        waits(torch.ones(3, device=META))
