"""The policy: a frozen base model sharded with FSDP2, and LoRA matrices that every rank holds whole."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from torch import Tensor, nn
from transformers import PreTrainedModel

from skylite.adapters.lora_modules import short_names
from skylite.config.lora import LoraConfig
from skylite.config.train import Resolved, TrainConfig
from skylite.errors import ModelError
from skylite.model.activation_checkpointing import Checkpointing, replay_layers
from skylite.model.adapted_modules import adapted_modules
from skylite.model.chunked_logprobs import token_logprobs
from skylite.model.distributed import Dist
from skylite.model.flat_params import laid_out
from skylite.model.lm_head import score_in_chunks
from skylite.model.loading import decoder_layers, load_base
from skylite.model.lora_linear import fuse
from skylite.model.packing import PackedTokens, Packing
from skylite.model.warm_start import load_adapter_file

POLICY, REF, CRITIC = "default", "ref", "critic"
"""Adapters on the one frozen base: the policy's own, a frozen copy of its start, the value function's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model under training and what the loop needs to know of it."""

    model: PeftModel
    lora: dict[str, nn.Parameter]
    """The policy's trainable parameters by name, sorted; fp32, the same on every rank."""
    flat_lora: Tensor
    """[P] the numbers of all of `lora`, in its order; the parameters are views of it, so that a sync has one tensor to fetch and write."""
    target_modules: list[str]
    """As adapter_config.json names them."""
    dtype: torch.dtype
    """Compute type."""
    packing: Packing
    head: nn.Linear | None
    """The vocabulary head where logprobs are made of hidden states a few rows at a time; None: the model makes all logits."""
    checkpointing: Checkpointing
    device: torch.device
    attention: str = "sdpa"
    """The form of attention over a tree, one of tree_attention.FORMS."""

    def autocast(self) -> AbstractContextManager[Any]:
        """In bf16 the fp32 LoRA matrices are used rounded to bf16: exactly what is published and what vLLM computes with."""
        return (
            torch.autocast(self.device.type, torch.bfloat16)
            if self.dtype == torch.bfloat16
            else nullcontext()
        )


def load_policy(resolved: Resolved, config: TrainConfig, dist: Dist) -> Policy:
    """Load, adapt, shard. Every rank calls it; the LoRA initialisation is rank 0's. Raises ModelError."""
    dtype = torch.float32 if resolved.dtype == "float32" else torch.bfloat16
    base, how = load_base(resolved.load_path, dtype, dist, config.trainer.offload)
    if dist.is_main:
        print(how, file=sys.stderr, flush=True)
    chosen = adapted_modules(base, config.lora)
    names = short_names((name for name, _ in base.named_modules()), chosen)
    layers = decoder_layers(base)
    torch.manual_seed(config.seed)
    model = _adapt(base, _peft_config(config.lora, chosen), config, chosen)
    model.eval()
    place_adapters(model, dist.device)
    params = adapter_params(model, POLICY)
    if resolved.warm_start is not None:
        load_adapter_file(Path(resolved.warm_start), params)
    flat_lora = laid_out(list(params.values()))
    dist.broadcast_(flat_lora)
    if REF in model.peft_config:
        for own, ref in zip(params.values(), adapter_params(model, REF).values(), strict=True):
            ref.data.copy_(own.data)
    checkpointing = config.trainer.checkpointing
    if checkpointing == "full":
        replay_layers(layers, has_dropout=config.lora.dropout > 0)
    return Policy(
        model=model,
        lora=params,
        flat_lora=flat_lora,
        target_modules=names,
        dtype=dtype,
        packing="padded",
        head=None,
        checkpointing=checkpointing,
        device=dist.device,
        attention=config.trainer.attention,
    )


def needs_ref_copy(config: TrainConfig) -> bool:
    """Whether the KL's reference is an adapter of its own. Without a warm start the start is the base: the adapter off."""
    return (
        config.algorithm.uses_ref
        and config.algorithm.kl_ref == "init"
        and config.lora.from_adapter is not None
    )


def score(policy: Policy, tokens: PackedTokens, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs [C] float32 of the completion tokens under the policy, and the entropies [C] in nats of what they were drawn from."""
    with policy.autocast():
        if policy.head is not None:
            return score_in_chunks(
                policy.model, policy.model.get_base_model(), policy.head, tokens, temperature
            )
        logits = policy.model(**tokens.inputs, use_cache=False).logits
    return token_logprobs(logits.flatten(0, 1), tokens.rows, tokens.targets, temperature)


def adapter_params(model: PeftModel, adapter: str) -> dict[str, nn.Parameter]:
    """The parameters of one adapter by name, sorted."""
    return dict(
        sorted((n, p) for n, p in model.named_parameters() if is_adapter(n) and adapter in n.split(".")[-2:])
    )


def place_adapters(model: PeftModel, device: torch.device) -> None:
    """Every adapter onto the device that computes. PEFT puts a matrix where its weight is: offloaded, the machine's memory."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for name in layer.adapter_layer_names:
                getattr(layer, name).to(device)


def is_adapter(parameter: str) -> bool:
    """Whether a parameter belongs to any LoRA adapter."""
    return ".lora_" in parameter


@contextmanager
def using_adapter(policy: Policy, adapter: str) -> Iterator[None]:
    """Run the model with another of its adapters; the gradients of a pass may be taken after the block."""
    _switch(policy.model, adapter)
    try:
        yield
    finally:
        _switch(policy.model, POLICY)


def _switch(model: PeftModel, adapter: str) -> None:
    """PEFT freezes what it switches off, and autograd then drops the gradients of a pass that is not yet taken back: thaw it again."""
    model.set_adapter(adapter)
    for name, param in model.named_parameters():
        if is_adapter(name) and REF not in name.split(".")[-2:]:
            param.requires_grad_(True)


@contextmanager
def reference_policy(policy: Policy) -> Iterator[None]:
    """Run the model as the KL's reference: the frozen copy of the start where there is one, else the base alone."""
    with using_adapter(policy, REF) if REF in policy.model.peft_config else policy.model.disable_adapter():
        yield


@contextmanager
def lora_dropout(policy: Policy, active: bool) -> Iterator[None]:
    """Switch the adapter's dropout, and nothing else, to training mode."""
    dropouts = [m for n, m in policy.model.named_modules() if n.endswith(f".lora_dropout.{POLICY}")]
    for module in dropouts:
        module.train(active)
    try:
        yield
    finally:
        for module in dropouts:
            module.eval()


def _adapt(base: PreTrainedModel, own: PeftLoraConfig, config: TrainConfig, chosen: list[str]) -> PeftModel:
    """The model with the policy's adapter, and those of reference and critic where the algorithm has them."""
    try:
        model = get_peft_model(base, own, adapter_name=POLICY)
    except ValueError as error:
        raise ModelError(
            f"PEFT cannot adapt {type(base).__name__}: {error}", "Name other modules in lora.target_modules."
        ) from error
    if needs_ref_copy(config):
        model.add_adapter(REF, _peft_config(config.lora.model_copy(update={"dropout": 0.0}), chosen))
    if config.algorithm.uses_critic:
        critic = config.critic
        lora = LoraConfig(rank=critic.rank, alpha=critic.alpha, use_rslora=config.lora.use_rslora)
        model.add_adapter(CRITIC, _peft_config(lora, chosen))
    _switch(model, POLICY)
    fuse(model)
    return model


def _peft_config(lora: LoraConfig, chosen: list[str]) -> PeftLoraConfig:
    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=chosen,
        use_rslora=lora.use_rslora,
        init_lora_weights=True if lora.init == "default" else lora.init,
    )
