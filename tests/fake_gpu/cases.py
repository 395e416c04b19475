"""Micro-batches on fake CUDA tensors, forward and backward. tests/unit/test_fake_gpu.py runs this file.

step_cases.py has the step around them. Both need a process of their own, because tests.fake_gpu.preload must
come before torch.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException
from transformers import AutoModelForCausalLM

from skylite.adapters.target_modules import ROUTERS, matches
from skylite.config.train import TrainConfig
from skylite.engine.model_sizes import sizes_of
from skylite.model import fast_path_check
from skylite.model.chunked_logprobs import HEAD_CHUNK_ELEMENTS
from skylite.model.policy import score
from skylite.model.tree_attention import ROW_ELEMENTS
from skylite.resources.gpu_memory_plan import TrainerMemory, trainer_memory
from skylite.trainer.critic import make_critic
from skylite.trainer.metrics import MetricSums
from skylite.trainer.micro_batches import MicroBatch, Table
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.trainer import Trainer
from tests.cases import table_of
from tests.fake_gpu.memory import Allocation, LiveBytes
from tests.fake_gpu.mode import GPU, HostSync, NoCopies, fake_gpu
from tests.fake_gpu.policies import fake_policy, micro_batch, one_rank
from tests.rows import Row
from tests.small_run import settings
from tests.tiny_models import tiny_config

PROMPT, COMPLETION, GROUP = 100, 500, 8
VOCAB = 1 << 16
FORMS = [
    ("llama", "tree", "sdpa"),
    ("llama", "padded", "sdpa"),
    ("qwen3", "tree", "flex"),
    ("gemma3", "tree", "sdpa"),
    ("moe", "tree", "flex"),
]


def moe_config(**sizes: Any) -> Any:
    return transformers.Qwen3MoeConfig(
        **sizes, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, head_dim=32
    )


def model_config(family: str) -> Any:
    """A tiny model with a large vocabulary."""
    config = tiny_config("llama" if family == "moe" else family)
    if family == "moe":
        names = "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads"
        config = moe_config(**{name: getattr(config, name) for name in names.split()})
    config.vocab_size = VOCAB
    return config


def group_batch(config: TrainConfig, vocab: int = VOCAB) -> Table:
    """One group: a shared prompt and completions that share nothing."""
    rng = random.Random(0)
    prompt = [rng.randrange(vocab) for _ in range(PROMPT)]
    rows = [
        Row(
            group=0,
            prompt_token_ids=prompt,
            completion_token_ids=[index, *(rng.randrange(vocab) for _ in range(COMPLETION - 1))],
            sampling_logprobs=[-1.0] * COMPLETION,
            reward=float(index == 0),
        )
        for index in range(GROUP)
    ]
    return table_of(rows, config)


def trained(family: str, packing: Any, config: TrainConfig) -> tuple[LiveBytes, MicroBatch]:
    """Run a micro-batch, forward and backward, and the optimizer. Returns what it allocated, and itself."""
    batch, config_of_model = group_batch(config), model_config(family)
    with fake_gpu(), LiveBytes() as memory:
        policy = fake_policy(config_of_model, config, packing)
        optim = config.optim
        optimizer = make_optimizer("policy", policy.lora, optim.lr, optim.max_grad_norm, optim)
        critic = make_critic(policy, config, one_rank()) if config.algorithm.uses_critic else None
        memory.reset_peak()
        with NoCopies():
            micro = micro_batch(batch, range(GROUP), policy, config)
            dist, sums = one_rank(), MetricSums()
            trainer = Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer, critic=critic)
            column = torch.empty_like(micro.token_weights)
            computed = replace(trainer.forward(micro), advantages=column, returns=column)
            trainer.forward_backward("policy", [computed], sums)
            if critic is not None:
                trainer.forward_backward("critic", [computed], sums)
            optimizer.adamw.step()
        assert {x.device for x in [*sums.sums.values(), sums.worst] if x is not None} == {GPU}
        assert all(p.grad is not None and p.grad.device == GPU for p in policy.lora.values())
    return memory, micro


def settings_of(attention: str = "sdpa", **sections: Any) -> TrainConfig:
    return settings(**{"trainer": {"attention": attention, "checkpointing": "selective"}, **sections})


@pytest.mark.parametrize(("family", "packing", "attention"), FORMS)
def test_a_micro_batch_stays_on_the_gpu_and_its_largest_tensor_is_a_chunk_of_logits(
    family: str, packing: str, attention: str
):
    memory, micro = trained(family, packing, settings_of(attention))
    largest = memory.largest()
    rows = min(HEAD_CHUNK_ELEMENTS["cuda"] // VOCAB, len(micro.tokens.tokens_before) - 1)
    assert largest.shape == (rows, VOCAB)
    assert largest.num_bytes == rows * VOCAB * 4, "a chunk of logits in float32"
    masks = [a for a in memory.allocations if is_square(a, micro.tokens.num_nodes)]
    assert not masks, "nobody may compare all nodes with all nodes"


def test_lora_gradients_are_products_in_float32_and_no_matrix_is_rounded_alone() -> None:
    memory, _ = trained("llama", "tree", settings_of())
    sizes = model_config("llama")
    products = [a for a in memory.allocations if a.operation == "aten.mm.dtype"]
    assert len(products) == (4 + 7) * sizes.num_hidden_layers, "A of each input, B of each matrix"
    rounded = [a for a in memory.allocations if a.operation == "aten._to_copy.default"]
    rank = settings_of().lora.rank
    assert not [a for a in rounded if len(a.shape) == 2 and rank in a.shape]


@pytest.mark.parametrize(
    ("family", "checkpointing"), [("mixtral", "selective"), ("qwen2_moe", "none"), ("qwen2_moe", "full")]
)
def test_the_peak_of_a_mixture_of_experts_is_predicted(family: str, checkpointing: str):
    """Within 10 %, forward and backward. Qwen2-MoE has a shared expert."""
    model, config = large_moe(family), settings_of(trainer={"checkpointing": checkpointing})
    batch = group_batch(config)
    with fake_gpu(), LiveBytes() as memory:
        policy = fake_policy(model, config, "tree")
        micro = micro_batch(batch, range(GROUP), policy, config)
        before = memory.reset_peak()
        logprobs, _ = score(policy, micro.tokens, 1.0)
        torch.autograd.grad(logprobs.sum(), list(policy.lora.values()))
    nodes = micro.tokens.num_nodes
    predicted = predicted_trainer(model, config)
    activations = predicted.total(nodes, GROUP * PROMPT) - predicted.state()
    assert activations == pytest.approx(memory.peak - before, rel=0.1)


def large_moe(family: str) -> Any:
    """Experts large enough to count beside the head's scratch."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 6, "num_attention_heads": 8, "vocab_size": VOCAB}
    sizes |= {"num_key_value_heads": 4, "num_experts_per_tok": 4}
    if family == "mixtral":
        return transformers.MixtralConfig(**sizes, intermediate_size=1536, num_local_experts=8)
    inner = {"intermediate_size": 2048, "shared_expert_intermediate_size": 1024, "moe_intermediate_size": 512}
    return transformers.Qwen2MoeConfig(**sizes, **inner, num_experts=16)


def predicted_trainer(model: Any, config: TrainConfig) -> TrainerMemory:
    """The prediction from the model's tensors."""
    with torch.device("meta"):
        tensors = {n: list(t.shape) for n, t in AutoModelForCausalLM.from_config(model).state_dict().items()}
    paths = {n.removesuffix(".weight") for n, s in tensors.items() if ".layers." in n and len(s) == 2}
    adapted = {path for path in paths if not matches(path, ROUTERS)}
    sizes = sizes_of(tensors, model.to_dict(), dict.fromkeys(adapted, config.lora.rank))
    return trainer_memory(sizes, config, "cuda", "bfloat16")


def is_square(allocation: Allocation, num_nodes: int) -> bool:
    return VOCAB not in allocation.shape and allocation.num_bytes >= num_nodes**2


@pytest.mark.parametrize(("attention", "family"), [("sdpa", "gemma3"), ("flex", "qwen3")])
def test_the_probes_stay_on_the_gpu(attention: str, family: str):
    """Not for mixtures of experts: the fake grouped product takes bfloat16 only, and the probe is float32."""
    with fake_gpu():
        policy = fake_policy(model_config(family), settings_of(attention), "tree", probes=True)
        fast_path_check._train_on(policy, list(range(24)))
    assert policy.lm_head is not None


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_the_other_ways_of_checkpointing_stay_on_the_gpu(checkpointing: str):
    trained("llama", "tree", settings(trainer={"checkpointing": checkpointing}))


@pytest.mark.parametrize(
    "algorithm",
    [{"name": "ppo"}, {"kl_coef": 0.1, "entropy_coef": 0.01}, {"name": "gspo", "updates_per_step": 2}],
    ids=["ppo", "kl and entropy", "gspo, two updates"],
)
def test_other_algorithms_stay_on_the_gpu(algorithm: dict[str, Any]):
    trained("qwen3", "tree", settings_of(algorithm=algorithm))


def test_the_masks_of_the_pieces_have_the_size_of_their_pieces():
    memory, micro = trained("llama", "tree", settings_of())
    tree = micro.tokens.inputs["tree"]
    longest = max(tree.sizes)
    above = max(sum(tree.sizes[i] for i in piece.ancestors) for piece in tree.pieces)
    columns = -(-(above + longest) // ROW_ELEMENTS) * ROW_ELEMENTS
    masks = {a.num_bytes for a in memory.allocations if a.shape == (longest, columns)}
    assert masks == {longest * columns * 2}, "bfloat16"


WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "float": lambda x: float(x.sum()),
    "bool": lambda x: bool(x.any()),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "index by a mask": lambda x: x[x > 0],
    "numpy": lambda x: x.cpu().numpy(),
    "upload": lambda x: x + torch.zeros(3).to(x.device),
    "other device": lambda x: x + torch.zeros(3),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_or_a_wrong_device_is_noticed(name: str):
    with fake_gpu(), NoCopies():
        x = torch.ones(3, device=GPU)
        with pytest.raises((HostSync, RuntimeError, DataDependentOutputException)):
            WAITS[name](x)


def test_full_checkpointing_keeps_only_the_inputs_of_the_layers():
    """Per layer and token: one hidden state in bfloat16. The head, embeddings and rounding: below 50 %."""
    config, wide = settings(trainer={"checkpointing": "full", "attention": "flex"}), model_config("llama")
    wide.num_hidden_layers, wide.vocab_size = 12, 260
    batch = group_batch(config, vocab=256)
    with fake_gpu(), LiveBytes() as memory:
        policy = fake_policy(wide, config, "tree")
        micro = micro_batch(batch, range(GROUP), policy, config)
        before = memory.reset_peak()
        logprobs, _ = score(policy, micro.tokens, 1.0)
        kept = memory.now - before
        del logprobs
    inputs = wide.num_hidden_layers * micro.tokens.num_nodes * wide.hidden_size * 2
    assert inputs <= kept < 1.5 * inputs
