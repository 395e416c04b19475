r"""How fast does a vLLM CPU server sample a LoRA adapter, compared with its base model?

    python benchmarks/lora_sampling.py --model MODEL_FOLDER
    python benchmarks/lora_sampling.py --model MODEL_FOLDER --variant "stock: SKYLITE_CPU_LORA="
    python benchmarks/lora_sampling.py --model MODEL_FOLDER --variant "gnu-openmp: LD_PRELOAD=" \
        --variant "block-128: --block-size 128"

Reports median tokens per second and the median ratio LoRA/base of the rounds. --variant adds a server with
other environment variables (KEY=VALUE; KEY= removes it) or flags; the first one above has vLLM's own LoRA
kernels. All servers take turns in every round, so that noise of the machine affects all of them: compare
ratios, not seconds.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shlex
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
from shared import argument_parser, machine_info

from skylite.config.engine import CpuLora
from skylite.engine.connections import Address
from skylite.engine.interface import BASE_NAME, EngineSpec
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.processes.child import ProcessSpec, child_died, kill, poll, start
from skylite.run.files import write_json
from skylite.run.run_dir import adapter_name

NUM_REQUESTS = 64
ADAPTER = adapter_name(1)
TARGET_MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
QUESTION = (
    "{name} picks {a} apples in the morning and {b} in the afternoon, gives {c} of them away and packs "
    "the rest into boxes of {d}. How many full boxes does {name} get?"
)


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """A server to measure."""

    name: str
    cpu_lora: CpuLora = "merged"
    env: tuple[tuple[str, str], ...] = ()
    flags: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Rate:
    """Tokens per second of one round on one server."""

    base: float
    lora: float


def main() -> None:
    args = parse_arguments()
    variants = [Variant("skylite")]
    variants += [parse_variant(text) for text in args.variant]
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        prompts = make_prompts(args.model)
        adapter = write_adapter(args.model, Path(folder, ADAPTER), args.rank)
        rates = measure(variants, args, Path(folder), adapter, prompts)
    result = {
        "date": time.strftime("%Y-%m-%d"),
        **machine_info(),
        "dtype": args.dtype,
        "rank": args.rank,
        "requests": NUM_REQUESTS,
        "tokens_a_request": args.tokens,
        "mean_prompt_tokens": statistics.mean(map(len, prompts)),
        "servers": {
            variant.name: summary(rates[variant.name], rates[variants[0].name], variant)
            for variant in variants
        },
    }
    print(json.dumps(result["servers"], indent=1))
    if args.out:
        write_json(args.out, result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument(
        "--model", type=Path, required=True, help="folder of a model with Llama's linear layers"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--pairs", type=int, default=5, help="rounds; each samples base and LoRA once")
    parser.add_argument("--tokens", type=int, default=64, help="completion tokens per request")
    parser.add_argument(
        "--variant",
        action="append",
        default=[],
        help='one more server, "NAME: KEY=VALUE KEY= --flag value"',
    )
    parser.add_argument("--out", type=Path, help="JSON file to write")
    return parser.parse_args()


def parse_variant(text: str) -> Variant:
    """`"NAME: KEY=VALUE --flag value"`: words before the first flag are environment variables."""
    name, _, rest = text.partition(":")
    words = shlex.split(rest)
    first_flag = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    pairs = tuple((key, value) for key, _, value in (word.partition("=") for word in words[:first_flag]))
    return Variant(name.strip(), env=pairs, flags=tuple(words[first_flag:]))


def make_prompts(model: Path) -> list[list[int]]:
    """Token ids of NUM_REQUESTS different questions in the model's chat template."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    names = ("Ada", "Ben", "Cleo", "Dov", "Eve", "Finn", "Gus", "Hana")
    texts = [
        QUESTION.format(name=names[i % 8], a=20 + i, b=41 + 2 * i, c=3 + i % 7, d=6 + i % 5)
        for i in range(NUM_REQUESTS)
    ]
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [
        tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats
    ]


def write_adapter(model: Path, folder: Path, rank: int) -> Path:
    """Save a PEFT adapter with random A and B on all linear layers."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(model)
    policy = get_peft_model(
        base, LoraConfig(r=rank, lora_alpha=rank, target_modules=TARGET_MODULES, task_type="CAUSAL_LM")
    )
    for name, parameter in policy.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.002)
    policy.save_pretrained(folder)
    return folder


def measure(
    variants: list[Variant], args: argparse.Namespace, folder: Path, adapter: Path, prompts: list[list[int]]
) -> dict[str, list[Rate]]:
    """Rates of every server in every round; round 0 only warms up."""
    rates: dict[str, list[Rate]] = {variant.name: [] for variant in variants}
    with ExitStack() as stack:
        servers = {
            variant.name: stack.enter_context(running(variant, args, folder, adapter)) for variant in variants
        }
        for index in range(args.pairs + 1):
            for name, http in servers.items():
                order = [BASE_NAME, ADAPTER] if index % 2 else [ADAPTER, BASE_NAME]
                speed = {
                    model: sample(http, model, prompts, args.tokens, f"round {index}") for model in order
                }
                base, lora = speed[BASE_NAME], speed[ADAPTER]
                print(f"{name} round {index}: base {base:.1f} tok/s, LoRA {lora:.1f} tok/s", flush=True)
                if index > 0:
                    rates[name].append(Rate(base, lora))
    return rates


def sample(http: httpx.Client, model: str, prompts: list[list[int]], max_tokens: int, salt: str) -> float:
    """Completion tokens per second, all prompts at once. The salt keeps prompts out of the prefix cache."""
    body = {
        "model": model,
        "prompt": prompts,
        "max_tokens": max_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
        "logprobs": 0,
    }
    started = time.perf_counter()
    reply = (
        http.post("/v1/completions", json=body | {"return_token_ids": True, "cache_salt": salt})
        .raise_for_status()
        .json()
    )
    seconds = time.perf_counter() - started
    return sum(len(choice["token_ids"]) for choice in reply["choices"]) / seconds


@contextmanager
def running(
    variant: Variant, args: argparse.Namespace, folder: Path, adapter: Path
) -> Iterator[httpx.Client]:
    """A server with the adapter loaded."""
    spec = engine_spec(variant, args, folder)
    env = VllmLauncher().environment(spec) | dict(variant.env)
    argv = [*VllmLauncher().command(spec), *variant.flags]
    child = start(ProcessSpec(name=spec.name, argv=argv, env=env, log_path=folder / f"{spec.name}.log"))
    try:
        with spec.address.client(1800.0) as http:
            while not is_ready(http):
                if poll(child) is not None:
                    raise SystemExit(f"{child_died(child)}\n{child_died(child).log_tail}")
                time.sleep(0.5)
            http.post(
                "/v1/load_lora_adapter", json={"lora_name": ADAPTER, "lora_path": str(adapter.resolve())}
            ).raise_for_status()
            yield http
    finally:
        kill(child)


def engine_spec(variant: Variant, args: argparse.Namespace, folder: Path) -> EngineSpec:
    return EngineSpec(
        name=variant.name,
        model_path=args.model,
        device="cpu",
        dtype=args.dtype,
        address=Address.of_socket(folder / f"{variant.name}.sock"),
        lora_rank=args.rank,
        target_modules=TARGET_MODULES,
        max_loras=2,
        max_model_len=512,
        max_num_seqs=128,
        kv_cache_gib=0.5,
        gpu_memory_utilization=0.5,
        cpu_lora=variant.cpu_lora,
        seed=0,
    )


def is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/health").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def summary(rates: list[Rate], reference: list[Rate], variant: Variant) -> dict[str, Any]:
    """Medians over the rounds. `..._vs_first`: ratio to the first server in the same round."""
    return {
        "base_tokens_per_s": round(statistics.median(r.base for r in rates), 1),
        "lora_tokens_per_s": round(statistics.median(r.lora for r in rates), 1),
        "lora_over_base": round(statistics.median(r.lora / r.base for r in rates), 3),
        "base_vs_first": round(
            statistics.median(r.base / f.base for r, f in zip(rates, reference, strict=True)), 3
        ),
        "lora_vs_first": round(
            statistics.median(r.lora / f.lora for r, f in zip(rates, reference, strict=True)), 3
        ),
        "rounds": [{"base": round(r.base, 1), "lora": round(r.lora, 1)} for r in rates],
        "changes": [f"{key}={value}" for key, value in variant.env] + list(variant.flags),
    }


if __name__ == "__main__":
    main()
