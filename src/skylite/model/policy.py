"""A policy under training: LoRA adapters on a frozen base model that several policies share.

The adapters are full on every rank. A policy has its own rank, targets and seed, and starts with the bits
that it would have alone on the base.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, cast, get_args

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import PeftModel, get_peft_model
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from skylite.adapters.import_adapter import lora_of, usual_name
from skylite.adapters.peft_targets import exactly_these_modules
from skylite.adapters.target_modules import in_layers, matches, reads_pictures, short_names, without_lora
from skylite.config.lora import LoraConfig
from skylite.config.resolved import Resolved
from skylite.config.train import TrainConfig
from skylite.errors import ModelError
from skylite.model.activation_checkpointing import Checkpointing, checkpoint_layers
from skylite.model.chunked_divergence import Head, SumOfSquares, Teacher
from skylite.model.chunked_logprobs import token_logprobs
from skylite.model.expert_lora import check_experts, group_expert_lora
from skylite.model.images import ImageReader, image_reader
from skylite.model.lm_head import hidden_states, score_in_chunks, top_tokens_in_chunks
from skylite.model.loading import decoder_layers, load_base, text_path
from skylite.model.lora_linear import drop_after_a, fuse_lora_layers, unfuse_lora_layers
from skylite.model.packing import PackedTokens, Packing
from skylite.model.process_group import Dist
from skylite.model.quantised_weights import QuantisedWeight
from skylite.untrusted_files import regular

# The adapters that a policy may have on the base.
POLICY: Final = "default"
"""The adapter under training."""
REF: Final = "ref"
"""The reference policy of the KL, if it is an adapter: a frozen copy of the warm-start adapter."""
CRITIC: Final = "critic"
"""PPO's value function."""
TEACHER: Final = "teacher"
"""The teacher of a distillation, if it is an adapter: one of a folder, or an average of the policy's."""
Role = Literal["default", "ref", "critic", "teacher"]
OWN_INITS: dict[str, Callable[[Tensor], Tensor]] = {
    "xavier": nn.init.xavier_normal_,
    "normal": partial(nn.init.normal_, std=0.2),
}
"""Values of lora.init that PEFT does not have: Megatron's, for A."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """A model under training, and how it runs."""

    model: PeftModel
    """The base with the adapters of all policies on it."""
    number: int = 0
    """Tells the policies on one base apart."""
    role: Role = POLICY
    """Which of the policy's adapters computes."""
    lora: dict[str, nn.Parameter]
    """Trainable parameters of the POLICY adapter by name, sorted; float32, equal on every rank. The names do
    not depend on `number`."""
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

    @property
    def adapter(self) -> str:
        """PEFT's name of the adapter that computes."""
        return peft_adapter_name(self.role, self.number)

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
    layers = decoder_layers(base)
    pair_cost = _pair_cost(base, layers)
    teacher = teacher_of(resolved)
    model = _add_adapters(base, config, 0, dtype, teacher)
    if trainer.checkpointing == "full":
        checkpoint_layers(layers, lambda: has_dropout(model))
    bare = Policy(
        model=model,
        lora={},
        target_modules=[],
        target_parameters=[],
        dtype=dtype,
        packing="padded",
        lm_head=None,
        checkpointing=trainer.checkpointing,
        device=dist.device,
        images=image_reader(base, resolved.model.path),
        attention=trainer.attention,
        pair_cost=pair_cost,
    )
    return _with_parameters(bare, config, resolved.identity.warm_start, teacher, dist)


@dataclass(frozen=True, slots=True)
class TeacherAdapter:
    """An adapter from a folder, for the role TEACHER."""

    folder: Path
    lora: LoraConfig
    """Settings that give its matrices."""


def teacher_of(resolved: Resolved) -> TeacherAdapter | None:
    """The run's copy of its teacher's adapter. None: the teacher has none in a folder. Raises ModelError."""
    folder = resolved.identity.teacher
    return None if folder is None else TeacherAdapter(folder, lora_of(folder, resolved.model.path))


def add_policy(
    policy: Policy, config: TrainConfig, warm_start: Path | None, teacher: TeacherAdapter | None, dist: Dist
) -> Policy:
    """Another policy on the base of `policy`. All ranks call it; rank 0 initialises LoRA for all.

    Raises ModelError as `load_policy` does, and if the base's policies have LoRA on other expert weights.
    """
    model, own = policy.model, config.lora.target_parameters
    for name, other in model.peft_config.items():
        theirs = other.target_parameters or []
        if name.startswith(POLICY) and sorted(theirs) != sorted(own):
            raise ModelError(
                f"A policy with lora.target_parameters={own} cannot share a base with one that has {theirs}.",
                "Give all policies of a base the same lora.target_parameters.",
            )
    numbers = [int(name.partition("_")[2] or 0) for name in model.peft_config]
    added = replace(policy, number=max(numbers, default=-1) + 1, role=POLICY)
    try:
        _add_adapters(model, config, added.number, policy.dtype, teacher)
        added = _with_parameters(added, config, warm_start, teacher, dist)
    except Exception:  # such as out of memory, or an adapter that does not fit
        remove_policy(added)
        raise
    base = model.get_base_model()
    head, modules = _unwrapped_head(base), original_modules(base)
    adapters = [config.lora] if teacher is None else [config.lora, teacher.lora]
    is_adapted = any(modules[name] is head for lora in adapters for name in adapted_modules(base, lora))
    return replace(added, lm_head=None) if is_adapted else added


def remove_policy(policy: Policy) -> None:
    """Take the policy's adapters off the base. Their memory is free once nobody holds the policy."""
    model = policy.model
    own = [peft_adapter_name(role, policy.number) for role in get_args(Role)]
    own = [name for name in own if name in model.peft_config]
    model.base_model.set_adapter([])  # else PEFT makes other adapters active, not the same in each layer
    for name in own:
        unfuse_lora_layers(model, name)
        model.delete_adapter(name)


def _with_parameters(
    policy: Policy, config: TrainConfig, warm_start: Path | None, teacher: TeacherAdapter | None, dist: Dist
) -> Policy:
    """The policy with the parameters of its new adapters, the same on all ranks."""
    model = policy.model
    move_adapters(model, dist.device)
    params = adapter_params(model, policy.adapter)
    if warm_start is not None:
        load_adapter_file(warm_start, params)
    for param in params.values():
        dist.broadcast_(param.data)
    for frozen in (role_params(policy, REF), role_params(policy, TEACHER) if teacher is None else {}):
        for param, copied in zip(params.values() if frozen else (), frozen.values(), strict=True):
            copied.data.copy_(param.data)
    if teacher is not None:
        load_adapter_file(teacher.folder, role_params(policy, TEACHER))
    base, images = model.get_base_model(), policy.images
    return replace(
        policy,
        lora=params,
        images=None if images is None else replace(images, has_lora=bool(config.lora.unfrozen)),
        target_modules=short_names(original_modules(base), adapted_modules(base, config.lora)),
        target_parameters=config.lora.target_parameters,
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
    """Sorted paths of the modules to adapt, in the text model and in what the settings do not freeze.

    Experts are not among them. Raises ModelError, which lists the modules, if none matches.
    """
    text, head = text_path(model), _unwrapped_head(model)
    modules = {
        name: module
        for name, module in original_modules(model).items()
        if not text or name.startswith(f"{text}.") or module is head or reads_pictures(name, config.unfrozen)
    }
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


def original_modules(model: nn.Module) -> dict[str, nn.Module]:
    """The modules by path, as if no adapter were there. PEFT wraps those that it adapts."""
    return {n.replace(".base_layer", ""): m for n, m in model.named_modules() if not is_lora_param(f"{n}.")}


def _unwrapped_head(model: nn.Module) -> nn.Module:
    """The model's LM head without its adapters."""
    head = cast(Any, model).get_output_embeddings()
    return cast(nn.Module, head.get_base_layer() if isinstance(head, BaseTunerLayer) else head)


def score(policy: Policy, tokens: PackedTokens, temperature: float) -> tuple[Tensor, Tensor]:
    """Logprobs [C] of the completion tokens and entropies [C] of their distributions.

    Both are float32, differentiable and in nats. Run the backward pass before another policy computes.
    """
    return _score(policy, tokens, temperature, None)[:2]


def compare(
    policy: Policy, tokens: PackedTokens, temperature: float, teacher: Teacher
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`score`, and divergences [C] with gradient and the teacher's logprobs [C] (Teacher.compare)."""
    logprobs, entropies, compared = _score(policy, tokens, temperature, teacher)
    assert compared is not None
    return logprobs, entropies, *compared


@torch.no_grad()
def score_and_squares(
    policy: Policy, tokens: PackedTokens, temperature: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`score`, and [C] the sum of the squared probabilities of the vocabulary in place of each token."""
    logprobs, entropies, compared = _score(policy, tokens, temperature, SumOfSquares())
    assert compared is not None
    return logprobs, entropies, compared[0]


def _score(
    policy: Policy, tokens: PackedTokens, temperature: float, teacher: Teacher | None
) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
    activate(policy)
    with policy.autocast():
        if policy.lm_head is not None:
            return score_in_chunks(
                policy.model,
                policy.model.get_base_model(),
                policy.lm_head,
                tokens,
                temperature,
                policy.kernels,
                teacher,
            )
        logits = policy.model(**tokens.model_inputs(), use_cache=False).logits
    logits = tokens.kept(logits).flatten(0, 1)
    # Before token_logprobs, whose backward overwrites the logits.
    compared = None if teacher is None else teacher.compare(logits, tokens, Head(), temperature)
    return *token_logprobs(logits, tokens.rows, tokens.targets, temperature), compared


@torch.no_grad()
def states(policy: Policy, tokens: PackedTokens) -> Tensor:
    """[C, H] the LM head's input that predicts each completion token, or the logits [C, V]."""
    activate(policy)
    with policy.autocast():
        if policy.lm_head is not None:
            return hidden_states(policy.model, policy.model.get_base_model(), tokens)
        logits = policy.model(**tokens.model_inputs(), use_cache=False).logits
    return tokens.kept(logits).flatten(0, 1)[tokens.rows]


@torch.no_grad()
def is_top_token(policy: Policy, tokens: PackedTokens) -> Tensor:
    """Bool [C]: the completion tokens that are the policy's most likely ones."""
    activate(policy)
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
    return re.sub(r"\.(default|teacher)(?=\.weight$|$)", "", parameter)


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


def peft_adapter_name(role: Role, number: int) -> str:
    """PEFT's name of an adapter: `default`, `critic`, and of further policies `default_1`, `critic_1`."""
    return f"{role}_{number}" if number else role


def adapter_params(model: PeftModel, adapter: str) -> dict[str, nn.Parameter]:
    """Parameters of one adapter by name, sorted. The names have the adapter's role, not its number."""
    role = adapter.partition("_")[0]
    own = [(n, p) for n, p in model.named_parameters() if is_lora_param(n) and adapter in n.split(".")[-2:]]
    return dict(sorted((role.join(n.rsplit(adapter, 1)), p) for n, p in own))


def role_params(policy: Policy, role: Role) -> dict[str, nn.Parameter]:
    """Parameters of another of the policy's adapters by name, sorted. Empty if it has none of this role."""
    adapter = peft_adapter_name(role, policy.number)
    return adapter_params(policy.model, adapter) if adapter in policy.model.peft_config else {}


def move_adapters(model: PeftModel, device: torch.device) -> None:
    """Move all adapters to the compute device. PEFT creates them beside weights that may be offloaded."""
    for layer in model.modules():
        if isinstance(layer, BaseTunerLayer):
            for name in layer.adapter_layer_names:
                getattr(layer, name).to(device)


def base_tensors(policy: Policy) -> list[Tensor]:
    """The weights of the base, and all buffers: what no policy changes."""
    weights = [p for name, p in policy.model.named_parameters() if not is_lora_param(name)]
    parts = [part for w in weights if isinstance(w, QuantisedWeight) for part in w.parts]
    plain = [w for w in weights if not isinstance(w, QuantisedWeight)]
    return [*plain, *parts, *policy.model.buffers()]


def is_lora_param(parameter: str) -> bool:
    """Whether a parameter name belongs to a LoRA adapter."""
    return ".lora_" in parameter


def activate(policy: Policy) -> None:
    """Let the policy's adapter compute, and no other. PEFT freezes the others, also in a pending backward."""
    # Not active_adapter, where PEFT keeps an adapter's name after `remove_policy` has made none active.
    if policy.model.active_adapters != [policy.adapter]:
        policy.model.set_adapter(policy.adapter)


@contextmanager
def frozen_policy(policy: Policy, role: Role) -> Iterator[Policy]:
    """The KL's reference (REF) or the TEACHER, inside the block: its adapter, else the base alone."""
    frozen = replace(policy, role=role)
    if frozen.adapter in policy.model.peft_config:
        yield frozen
        return
    with policy.model.disable_adapter():
        yield policy


def has_dropout(model: PeftModel) -> bool:
    """Whether the adapter that computes has dropout."""
    return bool(model.peft_config[model.active_adapter].lora_dropout)


@contextmanager
def lora_dropout(policy: Policy, active: bool) -> Iterator[None]:
    """Put the dropout of the POLICY adapter, and nothing else, into training mode inside the block."""
    if not policy.model.peft_config[policy.adapter].lora_dropout:  # a walk over all modules takes 5 ms
        yield
        return
    dropouts = [m for n, m in policy.model.named_modules() if n.endswith(f".lora_dropout.{policy.adapter}")]
    for module in dropouts:
        module.train(active)
    try:
        yield
    finally:
        for module in dropouts:
            module.eval()


def _add_adapters(
    model: PreTrainedModel | PeftModel,
    config: TrainConfig,
    number: int,
    dtype: torch.dtype,
    teacher: TeacherAdapter | None,
) -> PeftModel:
    """The model with a further POLICY adapter, and with the other roles that the algorithm needs.

    The same seed gives the same bits, whatever else is on the base.
    """
    # Not get_base_model(), which needs an active adapter.
    base: PreTrainedModel = model.base_model.model if isinstance(model, PeftModel) else model
    critic, modules = config.critic_lora, adapted_modules(base, config.lora)
    adapters: dict[Role, PeftLoraConfig] = {POLICY: _peft_config(config.lora, modules)}
    frozen = _peft_config(config.lora.model_copy(update={"dropout": 0.0}), modules)
    if config.needs_ref_adapter:
        adapters[REF] = frozen
    if config.has_average:
        adapters[TEACHER] = frozen
    if teacher is not None:
        adapters[TEACHER] = _peft_config(teacher.lora, adapted_modules(base, teacher.lora))
    if critic is not None:
        adapters[CRITIC] = _peft_config(critic, adapted_modules(base, critic))
    if not isinstance(model, PeftModel):
        check_experts(base, config.lora)
    torch.manual_seed(config.seed)
    names = {role: peft_adapter_name(role, number) for role in adapters}
    with exactly_these_modules(), _unrounded(dtype):
        try:
            for role, peft_config in adapters.items():
                if isinstance(model, PeftModel):
                    model.add_adapter(names[role], peft_config)
                else:
                    model = get_peft_model(model, peft_config, adapter_name=names[role])
        except ValueError as error:
            raise ModelError(
                f"PEFT cannot adapt {type(base).__name__}: {error}",
                "Choose other modules in lora.target_modules.",
            ) from error
    model = cast(PeftModel, model)
    if (fill := OWN_INITS.get(config.lora.init)) is not None:
        for name, param in adapter_params(model, names[POLICY]).items():
            if "lora_A" in name:
                layer = model.get_submodule(name.partition(".lora_A.")[0])
                for matrix in torch.split(param.data, layer.r[names[POLICY]]):  # of experts: one each
                    fill(matrix)
    if config.lora.dropout and config.lora.dropout_position == "after":
        drop_after_a(model, names[POLICY])
    model.set_adapter(names[POLICY])
    model.eval()
    for name in names.values():
        fuse_lora_layers(model, name)
    group_expert_lora(model)
    return model


@contextmanager
def _unrounded(dtype: torch.dtype) -> Iterator[None]:
    """Let PEFT make LoRA matrices in `dtype`, also beside weights that `store_in_bf16` has narrowed."""
    found = BaseTunerLayer._get_base_layer_device_and_dtype

    def widened(layer: BaseTunerLayer, base_layer: nn.Module) -> tuple[Any, torch.dtype | None]:
        device, own = found(layer, base_layer)
        return device, dtype if dtype == torch.float32 and own == torch.bfloat16 else own

    BaseTunerLayer._get_base_layer_device_and_dtype = widened
    try:
        yield
    finally:
        BaseTunerLayer._get_base_layer_device_and_dtype = found


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
        init_lora_weights=True if lora.init in ("default", *OWN_INITS) else lora.init,
    )
