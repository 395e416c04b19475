r"""How often do engine and trainer send a token to other experts, and what does that cost in mismatch?

    python benchmarks/expert_mismatch.py
    python benchmarks/expert_mismatch.py --layers 12 --experts 32 --per-token 8

A random Qwen3-MoE samples in vLLM on the CPU with skylite's plugin; both sides note the experts of every
token and layer. The trainer scores the samples twice: with its own experts, and with those that the engine
chose (router replay, arXiv 2510.11370), weighted by its own router. KL: k3, mean over the sampled tokens, in
nats.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shared import argument_parser, machine_info

from skylite.algorithms.kl import k3
from skylite.engine.vllm.plugin import SWITCH
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, load_policy, score
from skylite.processes.hardware import Dtype
from skylite.run.files import write_json
from skylite.types import completion_example
from tests.decisions import resolved
from tests.small_run import lone_rank, settings

PROMPT_TOKENS, VOCABULARY = 16, 512
RANK = 8
"""Reserved in vLLM: with LoRA on, skylite's plugin computes the experts, as in a run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A completion, and the experts that the engine chose."""

    prompt: list[int]
    completion: list[int]
    logprobs: list[float]
    experts: torch.Tensor
    """[tokens but the last, layers, experts a token], in ascending order."""


def main() -> None:
    args = parse_arguments()
    torch.set_num_threads(1)
    results = []
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        model = make_moe(Path(folder, "model"), args)
        for dtype in args.dtype:
            results.append({"dtype": dtype, **compare(model, dtype, sample(model, dtype, args))})
            print(json.dumps(results[-1]), flush=True)
    sizes = {name: getattr(args, name) for name in ("layers", "hidden", "experts", "per_token", "std")}
    write_json(args.out, {"date": time.strftime("%Y-%m-%d"), **machine_info(), **sizes, "results": results})
    print(f"wrote {args.out}")


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    for name, value in (("layers", 8), ("hidden", 256), ("experts", 16), ("per-token", 4)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--std", type=float, default=0.05, help="deviation of the random weights")
    parser.add_argument("--dtype", nargs="+", choices=("bfloat16", "float32"), default=["bfloat16"])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of a completion")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/expert_mismatch.json"))
    return parser.parse_args()


def make_moe(folder: Path, args: argparse.Namespace) -> Path:
    """A random Qwen3-MoE without a tokenizer."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=args.hidden,
        intermediate_size=2 * args.hidden,
        moe_intermediate_size=args.hidden // 2,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden // 32,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=args.experts,
        num_experts_per_tok=args.per_token,
        norm_topk_prob=True,
        max_position_embeddings=1024,
        initializer_range=args.std,
        bos_token_id=None,
        eos_token_id=None,
        tie_word_embeddings=False,
    )
    # Rounded first: both types of number then have the same weights.
    model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def sample(model: Path, dtype: Dtype, args: argparse.Namespace) -> list[Sample]:
    """Completions at temperature 1, one request at a time, so that the order of the experts is known."""
    os.environ |= {
        SWITCH: "dense",
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",  # functions go to the worker
        # Cores are shared, and vLLM's threads wait for each other without sleep.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
    }
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=str(model),
        dtype=dtype,
        skip_tokenizer_init=True,
        enable_lora=True,
        max_lora_rank=RANK,
        max_model_len=512,
        max_num_seqs=1,
        kv_cache_memory_bytes=2**28,
        enable_prefix_caching=False,
        enable_chunked_prefill=False,
        max_num_batched_tokens=512,
        block_size=32,
        logprobs_mode="processed_logprobs",
        async_scheduling=False,
    )
    llm.collective_rpc(note_experts)
    llm.collective_rpc(take_experts)
    generator, found = torch.Generator().manual_seed(1), []
    for _ in range(args.prompts):
        prompt = torch.randint(VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist()
        wanted = SamplingParams(max_tokens=args.tokens, temperature=1.0, logprobs=0, detokenize=False)
        [reply] = llm.generate([{"prompt_token_ids": prompt}], wanted, use_tqdm=False)
        [experts] = llm.collective_rpc(take_experts)
        tokens, out = list(reply.outputs[0].token_ids), reply.outputs[0].logprobs
        assert out is not None
        logprobs = [row[token].logprob for token, row in zip(tokens, out, strict=True)]
        chosen = torch.tensor(experts)[:, : len(prompt) + len(tokens) - 1].transpose(0, 1)
        found.append(Sample(prompt=prompt, completion=tokens, logprobs=logprobs, experts=chosen))
    return found


def note_experts(worker: Any) -> None:
    """In vLLM's worker: keep what each layer's router chooses."""
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    model = worker.get_model()
    # Two modules hold a layer's router.
    held = (getattr(module, "router", None) for module in model.modules())
    routers = list(dict.fromkeys(router for router in held if isinstance(router, BaseRouter)))
    model.noted = [[] for _ in routers]
    for router, rows in zip(routers, model.noted, strict=True):
        router.set_capture_fn(lambda ids, rows=rows: rows.extend(ids.sort(-1).values.tolist()))


def take_experts(worker: Any) -> list[list[list[int]]]:
    """In vLLM's worker: [layers][tokens][experts a token] since the last call."""
    noted = worker.get_model().noted
    taken = [list(rows) for rows in noted]
    for rows in noted:
        rows.clear()
    return taken


def compare(model: Path, dtype: Dtype, samples: list[Sample]) -> dict[str, float]:
    """The mismatch of the sampled tokens with the trainer's experts and with the engine's."""
    own, replayed, same = [], [], []
    with lone_rank() as dist, torch.no_grad():
        policy = load_policy(resolved(model, model, placement={"dtype": dtype}), settings(), dist)
        for number, given in enumerate(samples):
            engine = torch.tensor(given.logprobs)
            with routers(policy, None) as noted:
                own.append(k3_of(scored(policy, given, number), engine))
            same.append(torch.stack([rows.sort(-1).values for rows in noted], 1) == given.experts)
            with routers(policy, given.experts) as noted:
                replayed.append(k3_of(scored(policy, given, number), engine))
    equal = torch.cat(same).all(-1)  # [tokens, layers]
    return {
        "tokens": sum(len(s.completion) for s in samples),
        "kl": statistics.mean(own),
        "kl_replayed": statistics.mean(replayed),
        "choices_that_differ": 1 - equal.double().mean().item(),
        "tokens_that_differ": 1 - equal.all(-1).double().mean().item(),
    }


def k3_of(trainer: torch.Tensor, engine: torch.Tensor) -> float:
    """An estimate of KL(engine, trainer): the engine sampled."""
    return float(k3(engine.double(), trainer.double()).mean())


def scored(policy: Policy, given: Sample, number: int) -> torch.Tensor:
    """[C] logprobs of the sampled tokens in the trainer."""
    example = completion_example(given.prompt, given.completion, group=number)
    return score(policy, pack_tokens([example], "padded", policy.device), temperature=1.0)[0]


@contextmanager
def routers(policy: Policy, forced: torch.Tensor | None) -> Iterator[list[torch.Tensor]]:
    """Inside the block the experts that each layer chooses are noted, or those of `forced` are taken.

    Forced experts have weights from the trainer's own router.
    """
    found = [m for m in policy.model.modules() if type(m).__name__.endswith("TopKRouter")]
    noted: list[torch.Tensor] = []

    def hook(layer: int) -> Callable[..., Any]:
        def note(module: Any, _inputs: Any, output: Any) -> Any:
            logits, _, chosen = output
            noted.append(chosen)
            if forced is None:
                return output
            weights = logits.float().softmax(-1).gather(1, forced[:, layer])
            return logits, (weights / weights.sum(-1, keepdim=True)).to(logits.dtype), forced[:, layer]

        return note

    handles = [router.register_forward_hook(hook(i)) for i, router in enumerate(found)]
    try:
        yield noted
    finally:
        for handle in handles:
            handle.remove()


if __name__ == "__main__":
    main()
