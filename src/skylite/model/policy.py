"""The policy under training: a frozen base model, and LoRA adapters, full on every rank."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils import transformers_weight_conversion as conversion
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from skylite.adapters.import_adapter import usual_name
from skylite.adapters.target_modules import in_layers, matches, short_names, without_lora
from skylite.config.lora import LoraConfig
from skylite.config.resolved import Resolved
from skylite.config.train import TrainConfig
from skylite.errors import ModelError
from skylite.model.activation_checkpointing import Checkpointing, checkpoint_layers
from skylite.model.chunked_logprobs import token_logprobs
from skylite.model.expert_lora import check_experts, group_expert_lora
from skylite.model.images import ImageReader, image_reader
from skylite.model.lm_head import score_in_chunks, top_tokens_in_chunks
from skylite.model.loading import decoder_layers, load_base, text_path
from skylite.model.lora_linear import drop_after_a, fuse_lora_layers
from skylite.model.packing import PackedTokens, Packing
from skylite.model.process_group import Dist
from skylite.untrusted_files import regular

# Names of the adapters that share the frozen base.
POLICY = "default"
"""The adapter under training."""
REF = "ref"
"""The reference policy of the KL, if it is an adapter: a frozen copy of the warm-start adapter."""
CRITIC = "critic"
"""PPO's value function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The model under training, and how it runs."""

    model: PeftModel
    lora: dict[str, nn.Parameter]
    """Trainable parameters of the POLICY adapter by name, sorted; float32, equal on every rank."""
    target_modules: list[str]
    """Module names as adapter_config.json has them."""
    target_parameters: list[str]
    """lora.target_parameters, if the model has experts with LoRA."""
    dtype: torch.dtype
    """Compute dtype."""
    packing: Packing
    """How sequences form one model call: as a prefix tree or as padded rows (model/packing.py)."""
    lm_head: nn.Linear | None
    """The LM head, if logprobs are computed in chunks of hidden states; None: the model returns logits."""
    checkpointing: Checkpointing
    device: torch.device
    kernels: bool = False
    """Whether Triton's kernels read the logits of `lm_head` (model/triton_kernels.py)."""
    images: ImageReader | None = None
    """None: the model is trained on text alone."""
    attention: str = "sdpa"
    """Attention over a tree, a key of attention_backends.BACKENDS."""
    pair_cost: float = 0.0
    """Work of a pair of tokens in all attention layers, in units of the work of one token in all matrices."""

    def autocast(self) -> AbstractContextManager[Any]:
        """In bfloat16, autocast rounds the float32 LoRA matrices to bfloat16, as publishing does."""
        return (
            torch.autocast(self.device.type, torch.bfloat16)
            if self.dtype == torch.bfloat16
            else nullcontext()
        )


def load_policy(resolved: Resolved, config: TrainConfig, dist: Dist) -> Policy:
    """Load the base, and add the adapters. All ranks call it; rank 0 initialises LoRA for all.

    Raises ModelError if the model cannot be loaded or adapted, or if the warm-start adapter does not fit.
    """
    dtype = torch.float32 if resolved.placement.dtype == "float32" else torch.bfloat16
    trainer = config.trainer
    base, how = load_base(str(resolved.model.path), dtype, dist, trainer.offload, trainer.replicate_base)
    if dist.is_main:
        print(how, file=sys.stderr, flush=True)
    modules = adapted_modules(base, config.lora)
    target_modules = short_names((name for name, _ in base.named_modules()), modules)
    layers = decoder_layers(base)
    pair_cost = _pair_cost(base, layers)
    torch.manual_seed(config.seed)
    model = _add_adapters(base, config, modules)
    model.eval()
    move_adapters(model, dist.device)
    params = adapter_params(model, POLICY)
    if resolved.identity.warm_start is not None:
        load_adapter_file(resolved.identity.warm_start, params)
    for param in params.values():
        dist.broadcast_(param.data)
    if REF in model.peft_config:
        for param, ref in zip(params.values(), adapter_params(model, REF).values(), strict=True):
            ref.data.copy_(param.data)
    checkpointing = trainer.checkpointing
    if checkpointing == "full":
        checkpoint_layers(layers, has_dropout=config.lora.dropout > 0)
    return Policy(
        model=model,
        lora=params,
        target_modules=target_modules,
        target_parameters=config.lora.target_parameters,
        dtype=dtype,
        packing="padded",
        lm_head=None,
        checkpointing=checkpointing,
        device=dist.device,
        images=image_reader(base, resolved.model.path),
        attention=trainer.attention,
        pair_cost=pair_cost,
    )


def _pair_cost(base: PreTrainedModel, layers: list[nn.Module]) -> float:
    """See `Policy.pair_cost`. 0 for a model without attention heads in its config.

    Of a forward and backward pass, in FLOP: a weight of a layer takes 2 + 2 per token (its own gradient is
    not computed), a pair 4 + 10 per channel (FlashAttention-2, arXiv 2307.08691).
    """
    config = base.config.get_text_config()
    heads = getattr(config, "num_attention_heads", 0)
    head_dim = config.to_dict().get("head_dim")  # Gemma 4's layers differ, and its config's attribute raises
    channels = heads * (head_dim or config.hidden_size // heads) if heads else 0
    weights = sum(p.numel() for layer in layers for p in layer.parameters() if p.dim() > 1)
    return 14 * channels * len(layers) / (4 * weights)


def adapted_modules(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Sorted paths of the modules to adapt, all in the text model.

    Experts are not among them. Raises ModelError, which lists the modules, if none matches.
    """
    text, head = text_path(model), model.get_output_embeddings()
    modules = {n: m for n, m in model.named_modules() if not text or n.startswith(f"{text}.") or m is head}
    # Routers of Llama 4 and Phi-MoE are linear layers that return more than logits; LoRA cannot wrap them.
    plain = {n for n, m in modules.items() if type(m).forward in (nn.Linear.forward, Conv1D.forward)}
    linear = {name for name in plain if not matches(name, without_lora(model.config.model_type))}
    if config.target_modules == "all-linear":
        selected = {name for name in linear if in_layers(name) and modules[name] is not head}
    else:
        embeddings = {name for name, m in modules.items() if isinstance(m, nn.Embedding)}
        selected = {name for name in linear | embeddings if matches(name, config.target_modules)}
    selected = {name for name in selected if not matches(name, config.exclude_modules)}
    if not selected and not config.target_parameters:
        available = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ModelError(
            f"No module of {type(model).__name__} matches lora.target_modules={config.target_modules!r} "
            f"without lora.exclude_modules={config.exclude_modules!r}.",
            f"Use names of its linear modules: {available}.",
        )
    return sorted(selected)


def score(policy: Policy, tokens: PackedTokens, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs [C] of the completion tokens and entropies [C] of their distributions.

    Both are float32, differentiable and in nats.
    """
    with policy.autocast():
        if policy.lm_head is not None:
            return score_in_chunks(
                policy.model,
                policy.model.get_base_model(),
                policy.lm_head,
                tokens,
                temperature,
                policy.kernels,
            )
        logits = policy.model(**tokens.model_inputs(), use_cache=False).logits
    return token_logprobs(tokens.kept(logits).flatten(0, 1), tokens.rows, tokens.targets, temperature)


@torch.no_grad()
def is_top_token(policy: Policy, tokens: PackedTokens) -> Tensor:
    """Bool [C]: the completion tokens that are the policy's most likely ones."""
    with policy.autocast():
        if policy.lm_head is not None:
            base = policy.model.get_base_model()
            top = top_tokens_in_chunks(policy.model, base, policy.lm_head, tokens)
        else:
            logits = policy.model(**tokens.model_inputs(), use_cache=False).logits
            top = tokens.kept(logits).flatten(0, 1).argmax(-1)
    return top[tokens.rows] == tokens.targets


def peft_tensor_name(parameter: str) -> str:
    """Name of a parameter in PEFT's files, which leave out the adapter's name.

    `...q_proj.lora_A.default.weight` -> `...q_proj.lora_A.weight`
    """
    return parameter.replace(".default.weight", ".weight").removesuffix(".default")


def load_adapter_file(folder: Path, params: Mapping[str, nn.Parameter]) -> None:
    """Copy `adapter_model.safetensors` of `folder` into `params`.

    Raises ModelError if the file cannot be read, or if its names or shapes are not exactly those of `params`.
    """
    path = folder / "adapter_model.safetensors"
    try:
        tensors = {usual_name(name): tensor for name, tensor in load_file(regular(path)).items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}.", "Give a complete adapter folder to --from-adapter."
        ) from None
    names = {peft_tensor_name(n): n for n in params}
    remedy = "Train the modules that the adapter has: set lora.target_modules and lora.exclude_modules."
    if missing := sorted(names.keys() - tensors.keys()):
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(names)} LoRA matrices that this run trains, "
            f"first {missing[0]}.",
            remedy,
        )
    if extra := sorted(tensors.keys() - names.keys()):
        raise ModelError(
            f"{folder} has {len(extra)} tensors that this run would not train, first {extra[0]}.", remedy
        )
    for tensor_name, name in names.items():
        if tensors[tensor_name].shape != params[name].shape:
            raise ModelError(
                f"{folder}: {tensor_name} has shape {list(tensors[tensor_name].shape)}, "
                f"but this run's model and rank need {list(params[name].shape)}.",
                "Use the adapter's own base model and --rank.",
            )
        params[name].data.copy_(tensors[tensor_name])


def adapter_params(model: PeftModel, adapter: str) -> dict[str, nn.Parameter]:
    """Parameters of one adapter by name, sorted."""
    return dict(
        sorted(
            (n, p) for n, p in model.named_parameters() if is_lora_param(n) and adapter in n.split(".")[-2:]
        )
    )


def move_adapters(model: PeftModel, device: torch.device) -> None:
    """Move all adapters to the compute device. PEFT creates them beside weights that may be offloaded."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for name in layer.adapter_layer_names:
                getattr(layer, name).to(device)


def is_lora_param(parameter: str) -> bool:
    """Whether a parameter name belongs to a LoRA adapter."""
    return ".lora_" in parameter


@contextmanager
def using_adapter(policy: Policy, adapter: str) -> Iterator[None]:
    """Activate another adapter inside the block. The backward of a pass may run after the block."""
    _activate(policy.model, adapter)
    try:
        yield
    finally:
        _activate(policy.model, POLICY)


def _activate(model: PeftModel, adapter: str) -> None:
    """Make `adapter` the active one and keep all adapters but REF trainable.

    PEFT freezes the adapters that it deactivates; a pending backward would then drop their gradients.
    """
    model.set_adapter(adapter)
    for name, param in model.named_parameters():
        if is_lora_param(name) and REF not in name.split(".")[-2:]:
            param.requires_grad_(True)


@contextmanager
def reference_policy(policy: Policy) -> Iterator[None]:
    """Run the KL's reference policy inside the block: the REF adapter if there is one, else the base
    alone."""
    with using_adapter(policy, REF) if REF in policy.model.peft_config else policy.model.disable_adapter():
        yield


@contextmanager
def lora_dropout(policy: Policy, active: bool) -> Iterator[None]:
    """Put the dropout of the POLICY adapter, and nothing else, into training mode inside the block."""
    if not policy.model.peft_config[POLICY].lora_dropout:  # a walk over all modules takes 5 ms
        yield
        return
    dropouts = [m for n, m in policy.model.named_modules() if n.endswith(f".lora_dropout.{POLICY}")]
    for module in dropouts:
        module.train(active)
    try:
        yield
    finally:
        for module in dropouts:
            module.eval()


def _add_adapters(base: PreTrainedModel, config: TrainConfig, modules: list[str]) -> PeftModel:
    """The model with the POLICY adapter, and with REF and CRITIC if the algorithm needs them."""
    critic = config.critic_lora
    critic_modules = adapted_modules(base, critic) if critic is not None else []
    check_experts(base, config.lora)
    with _exactly_these_modules():
        try:
            model = get_peft_model(base, _peft_config(config.lora, modules), adapter_name=POLICY)
        except ValueError as error:
            raise ModelError(
                f"PEFT cannot adapt {type(base).__name__}: {error}",
                "Choose other modules in lora.target_modules.",
            ) from error
        if config.needs_ref_adapter:
            model.add_adapter(REF, _peft_config(config.lora.model_copy(update={"dropout": 0.0}), modules))
        if critic is not None:
            model.add_adapter(CRITIC, _peft_config(critic, critic_modules))
    if config.lora.init == "xavier":
        for name, param in adapter_params(model, POLICY).items():
            if "lora_A" in name:
                layer = model.get_submodule(name.partition(".lora_A.")[0])
                for matrix in torch.split(param.data, layer.r[POLICY]):  # of experts: one each
                    nn.init.xavier_normal_(matrix)
    if config.lora.dropout and config.lora.dropout_position == "after":
        drop_after_a(model, POLICY)
    _activate(model, POLICY)
    fuse_lora_layers(model)
    group_expert_lora(model)
    return model


@contextmanager
def _exactly_these_modules() -> Iterator[None]:
    """Keep PEFT from choosing other modules than named.

    In models such as DeepSeek-V3 it takes a dense MLP's gate_proj for the experts' of transformers 4, and
    adapts the experts' parameters in its place.
    """
    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert


def _peft_config(lora: LoraConfig, modules: list[str]) -> PeftLoraConfig:
    return PeftLoraConfig(
        task_type="CAUSAL_LM",
        r=lora.rank,
        lora_alpha=lora.alpha,
        lora_dropout=lora.dropout,
        target_modules=modules,
        target_parameters=lora.target_parameters or None,
        use_rslora=lora.use_rslora,
        rank_pattern=lora.rank_pattern,
        alpha_pattern=lora.alpha_pattern,
        init_lora_weights=True if lora.init in ("default", "xavier") else lora.init,
    )
