"""Serve a tiny random model of a family in vLLM on this CPU, and write skylite/engine/vllm/cpu_families.json.

    python -m tests.serving_sweep                    every mixture of experts, and the families in OTHERS
    python -m tests.serving_sweep gpt_oss gemma4     only these, in place of their old results
    python -m tests.serving_sweep - < QUESTIONS      engine_side of each [model, adapters, dtype, kinds]

Each family is compared with the trainer: log-probabilities of the base, and of an adapter on each kind of
module alone, because vLLM ignores matrices whose names lead to no module of its own. Takes ten minutes: vLLM
is imported once, and a fork serves each family.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file, save_file

from skylite.adapters.experts import BOTH, served_modules
from skylite.adapters.manifest import Canary
from skylite.adapters.target_modules import last_names
from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.connections import Address
from skylite.engine.interface import EngineSpec
from skylite.engine.vllm.cpu_families import TABLE, CpuFamily, read_cpu_families
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.models import vllm_version
from skylite.hub.families import read_sweep
from skylite.processes.hardware import Dtype
from tests import tiny_families
from tests.decisions import resolved
from tests.forks import in_a_fork
from tests.small_run import lone_rank, settings

SEQUENCES = [[(7 * k * k + 3 * g) % 250 for k in range(40)] for g in range(4)]
OTHERS: dict[str, str | None] = {
    **dict.fromkeys(("gemma4", "gemma4_text"), ""),
    **dict.fromkeys(("minicpm3", "falcon_h1")),
    **dict.fromkeys(
        ("granitemoe", "granitemoeshared", "granitemoehybrid", "lfm2_moe"),
        "was not asked, because its files name them otherwise",
    ),
}
"""Families whose files name no experts, or otherwise -> why these have no LoRA, if they are any."""
LIMIT_S = 150.0
NEAR = 1e-3
"""Largest difference between engine and trainer in float32, in nats."""
ROUNDING = 3.0
"""The same in bfloat16, for the base alone, in units of what it changes in the trainer's logprobs."""
SHARE: dict[Dtype, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Largest |1 - share of an adapter's move that the engine shows|."""
STRONGER = {"in_proj_a": 100, "in_proj_b": 10, "in_proj_ba": 10}
"""Decay and gate of a delta net move bfloat16's logprobs by less than their rounding otherwise."""
LATENT = {"topk_method": "noaux_tc", "scoring_func": "sigmoid"}
MROPE = {"rope_parameters": {**tiny_families.ROPE, "mrope_section": [6, 5, 5]}}
PUBLISHED: dict[str, dict[str, Any]] = {
    "afmoe": {"score_func": "sigmoid", "route_norm": True, "n_group": 1, "topk_group": 1},
    "axk1": LATENT,
    "deepseek_v3": LATENT,
    "deepseek_v32": {"index_head_dim": 128},
    "glm_moe_dsa": {"index_head_dim": 128},
    "mistral4": {"head_dim": 96},
    "gemma4": {"vision_config": {**tiny_families.TOWER, "num_key_value_heads": 2, "head_dim": 16}},
    "gemma4_text": {
        "enable_moe_block": True, "num_experts": tiny_families.EXPERTS, "top_k_experts": 2,
        "moe_intermediate_size": 32,
    },
    "glm4_moe": {"head_dim": 32},
    "glm4_moe_lite": {**LATENT, "first_k_dense_replace": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "glm4v_moe_text": {
        "head_dim": 32, "use_qk_norm": False,
        "rope_parameters": {**tiny_families.ROPE, "mrope_section": [2, 2, 4], "partial_rotary_factor": 0.5},
    },
    "hunyuan_v1_moe": {"head_dim": 32},
    "hy_v3": {"first_k_dense_replace": 1, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "llama4_text": {"num_experts_per_tok": 1},
    "minimax_m2": {"rotary_dim": 16, "scoring_func": "sigmoid", "use_routing_bias": True},
    "qwen2_moe": {"use_sliding_window": False},
    "qwen3_vl_moe_text": {"norm_topk_prob": True, **MROPE},
    "solar_open": {"head_dim": 32},
    # All experts: which ones a router chooses of near ones is up to rounding, and bfloat16 rounds much.
    "qwen3_5_moe_text": {"num_experts_per_tok": tiny_families.EXPERTS},
    "qwen3_next": {"num_experts_per_tok": tiny_families.EXPERTS},
}  # fmt: skip
"""What published models of a family have in config.json and vLLM reads, beside or in place of `OWN`."""
TRANSPOSED = ("qwen3_vl_moe",)
"""Families whose files have the matrices of experts transposed. transformers does not save them so again."""


class Refused(Exception):
    """Why vLLM does not serve the family, in words that complete `vLLM 0.32.0 ...`."""


@contextmanager
def served_sizes() -> Iterator[None]:
    """Inside the block tiny models have sizes that vLLM's CPU kernels take: heads of 32, and latent attention
    and delta nets as published."""
    tiny = tiny_families
    before = dict(tiny.SIZES), dict(tiny.OWN)
    for size, names in tiny.BY_SIZE:
        if size in (tiny.HIDDEN, 2 * tiny.HIDDEN, tiny.HEAD, tiny.HEAD // 2):
            tiny.SIZES.update(dict.fromkeys(names.split(), 2 * size))
    tiny.SIZES.update({"kv_lora_rank": 512, "qk_rope_head_dim": 64, "qk_head_dim": 2 * tiny.HEAD + 64})
    tiny.SIZES.update({"moe_intermediate_size": 32, "shared_expert_intermediate_size": 64})
    tiny.SIZES.update(dict.fromkeys(("mamba_n_heads", "mamba_num_heads", "n_mamba_heads"), tiny.HEAD // 2))
    tiny.SIZES["max_position_embeddings"] = 1024  # what the servers of tests take
    tiny.SIZES.update({"linear_key_head_dim": 128, "linear_value_head_dim": 128})
    for name, settings_of_it in PUBLISHED.items():
        tiny.OWN[name] = tiny.OWN.get(name, {}) | settings_of_it
    yield
    for table, content in zip((tiny.SIZES, tiny.OWN), before, strict=True):
        table.clear()
        table.update(content)


def make_model(folder: Path, family: str) -> Dtype:
    """The model in `folder`, and the type in which vLLM computes it."""
    with served_sizes():
        tiny_families.make_family(folder, family)
    if family in TRANSPOSED:
        file = folder / "model.safetensors"
        tensors = load_file(file)
        save_file({n: t.swapaxes(1, 2).copy() if ".experts." in n else t for n, t in tensors.items()}, file)
    return "bfloat16" if VllmLauncher().bf16_reason(folder, "cpu") else "float32"


def trainer_side(model: Path, adapters: Path, dtype: Dtype, config: TrainConfig) -> dict[str, Any]:
    """Log-probabilities of the base and of an adapter on each kind of module alone, which it publishes.

    `rounding` is the largest difference of the base to float32.
    """
    import torch

    from skylite.trainer.canary import base_canary_logprobs, canary_logprobs
    from skylite.trainer.publish_adapter import write_adapter
    from tests.cases import policy_of

    torch.set_num_threads(1)  # a fork has none of its parent's threads
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(model, adapters))
    canary = Canary(sequences=[], policy_logprobs=[], base_logprobs=[])
    with lone_rank() as dist:
        policy = policy_of(model, config, dist, dtype=dtype)
        kinds = last_names(served_modules(policy.target_modules, policy.target_parameters))
        base, moved = flat(base_canary_logprobs(policy, SEQUENCES)), {}
        for version, kind in enumerate(kinds):
            with only(policy, kind):
                moved[kind] = flat(canary_logprobs(policy, SEQUENCES))
                write_adapter(policy, run_config, version, canary)
    with lone_rank() as dist:
        exact = flat(base_canary_logprobs(policy_of(model, config, dist), SEQUENCES))
    return {"base": base, "moved": moved, "rounding": largest(base, exact)}


@contextmanager
def only(policy: Any, kind: str) -> Iterator[None]:
    """Inside the block all B matrices but this kind's are 0, and a weak kind's are `STRONGER`."""
    before = {name: param.data.clone() for name, param in policy.lora.items()}
    for name, param in policy.lora.items():
        if "lora_B" in name:
            param.data *= STRONGER.get(kind, 1) * (f".{kind}.lora_B" in name.replace(".base_layer", ""))
    yield
    for name, param in policy.lora.items():
        param.data.copy_(before[name])


def engine_side(model: Path, adapters: Path, dtype: Dtype, kinds: Sequence[str]) -> dict[str, Any]:
    """The same of vLLM, as a run starts it, but inside this process.

    `decoded` is the largest difference between the logprobs of sampled tokens and of the same as a prompt.
    """
    from vllm import LLM, SamplingParams
    from vllm.engine.arg_utils import EngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.lora.request import LoRARequest
    from vllm.model_executor.models import registry
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    registry._run_in_subprocess = lambda ask: ask()  # which imports vLLM once more
    spec = engine_spec(model, dtype, list(kinds))
    args = make_arg_parser(FlexibleArgumentParser()).parse_args(VllmLauncher().command(spec)[3:])
    args.distributed_executor_backend = "uni"
    names = {field.name for field in fields(EngineArgs)}
    llm = LLM(**{name: value for name, value in vars(args).items() if name in names})
    scored = SamplingParams(max_tokens=1, temperature=1.0, prompt_logprobs=0)
    sampled = SamplingParams(max_tokens=24, temperature=0.0, logprobs=0, ignore_eos=True)

    def logprobs(sequences: list[list[int]], adapter: LoRARequest | None) -> list[float]:
        prompts = [{"prompt_token_ids": ids} for ids in sequences]
        rows = [
            o.prompt_logprobs for o in llm.generate(prompts, scored, lora_request=adapter, use_tqdm=False)
        ]
        return [row[i][ids[i]].logprob for row, ids in zip(rows, sequences, strict=True)
                for i in range(1, len(ids))]  # fmt: skip

    prompt = SEQUENCES[0][:20]
    [output] = llm.generate([{"prompt_token_ids": prompt}], sampled, use_tqdm=False)
    tokens = list(output.outputs[0].token_ids)
    alone = [row[t].logprob for row, t in zip(output.outputs[0].logprobs, tokens, strict=True)]
    again = logprobs([prompt + tokens], None)[-len(tokens) :]
    moved = {
        kind: logprobs(SEQUENCES, LoRARequest(kind, n + 1, str(path), is_3d_lora_weight=True))
        for n, (kind, path) in enumerate(zip(kinds, sorted(adapters.glob("policy-v*")), strict=True))
    }
    return {"base": logprobs(SEQUENCES, None), "moved": moved, "decoded": largest(alone, again)}


def engine_spec(model: Path, dtype: Dtype, modules: list[str]) -> EngineSpec:
    """A small engine. Nothing listens at its address."""
    return EngineSpec(
        name="sweep", model_path=model, device="cpu", dtype=dtype, address=Address.of_socket(Path("no.sock")),
        lora_rank=8, target_modules=modules, max_loras=2, max_model_len=512, max_num_seqs=16,
        kv_cache_gib=0.05, gpu_memory_utilization=0.5, cpu_lora="dense", seed=0,
    )  # fmt: skip


def measure(family: CpuFamily) -> CpuFamily:
    """The family's entry, with LoRA on experts if that works."""
    with tempfile.TemporaryDirectory() as root:
        model = Path(root) / family.name
        dtype: Dtype = ask(
            lambda: make_model(model, family.name), "was not asked, because no tiny model could be made"
        )
        family = replace(family, dtype=dtype)
        if family.experts != "":
            return compared(family, model, settings())
        try:
            both = settings(lora={"target_parameters": BOTH})
            return compared(replace(family, experts=""), model, both)
        except Refused as refusal:
            return compared(replace(family, experts=str(refusal)), model, settings())


def compared(family: CpuFamily, model: Path, config: TrainConfig) -> CpuFamily:
    """Compare engine and trainer. Raises Refused."""
    with tempfile.TemporaryDirectory() as folder:
        adapters, dtype = Path(folder), family.dtype
        own = ask(
            lambda: trainer_side(model, adapters, dtype, config),
            "was not asked, because the trainer ends with the tiny model",
        )
        found = ask(
            lambda: engine_side(model, adapters, dtype, list(own["moved"])),
            "ends with the tiny model of the sweep",
        )
    base, decoded = largest(found["base"], own["base"]), found["decoded"]
    limit = NEAR if dtype == "float32" else ROUNDING * own["rounding"]
    if not base < limit or not decoded < limit:
        raise Refused(f"computes other log-probabilities there, by {max(base, decoded):.1g} nats")
    shares = {kind: abs(1 - share(found, own, kind)) for kind in own["moved"]}
    if wrong := [kind for kind, off in shares.items() if not off < SHARE[dtype]]:
        raise Refused(f"leaves out LoRA on {', '.join(wrong)}, in full or in part")
    gaps = max(largest(found["moved"][kind], own["moved"][kind]) for kind in shares)
    if dtype == "float32" and gaps > NEAR:
        raise Refused(f"computes other log-probabilities with an adapter there, by {gaps:.1g} nats")
    return replace(family, base=rounded(base), lora=rounded(gaps), share=rounded(max(shares.values())))


def share(found: Mapping[str, Any], own: Mapping[str, Any], kind: str) -> float:
    """The part of the adapter's move that the engine shows. 1 is right."""
    move = [a - b for a, b in zip(own["moved"][kind], own["base"], strict=True)]
    seen = [a - b for a, b in zip(found["moved"][kind], found["base"], strict=True)]
    return sum(a * b for a, b in zip(seen, move, strict=True)) / sum(a * a for a in move)


def ask(work: Callable[[], Any], otherwise: str) -> Any:
    """What `work` returns, from a fork. Raises Refused with the last error that it wrote."""
    with tempfile.NamedTemporaryFile("r", encoding="utf-8", errors="replace") as log:

        def logged() -> Any:
            for stream in (sys.stdout, sys.stderr):
                os.dup2(os.open(log.name, os.O_WRONLY | os.O_APPEND), stream.fileno())
            return work()

        text = in_a_fork(logged, LIMIT_S)
        if text:
            return json.loads(text)
        errors = [line for line in log.read().splitlines() if re.match(r"[\w.]*(Error|Exception)\b", line)]
    raise Refused(f"{otherwise}: {(errors or ['it ended without a word'])[-1][:200]}")


def largest(a: Sequence[float], b: Sequence[float]) -> float:
    """The largest difference."""
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def rounded(value: float) -> float:
    return float(f"{value:.1e}")


def flat(rows: list[list[float]]) -> list[float]:
    return [x for row in rows for x in row]


def swept_families() -> list[CpuFamily]:
    """All that the trainer computes and vLLM may serve: mixtures of experts, and OTHERS."""
    return [
        CpuFamily(name=f.name, architecture=f.architecture, experts=OTHERS.get(f.name, ""))
        for f in read_sweep().families.values()
        if not f.refused
        and not f.on_gpu
        and (f.experts or f.name.startswith("granitemoe") or f.name in OTHERS)
    ]


def write_table(families: Iterable[CpuFamily]) -> None:
    """cpu_families.json, a family in each line."""
    lines = ",\n".join("  " + json.dumps(asdict(f)) for f in sorted(families, key=lambda f: f.name))
    version = json.dumps({"vllm": vllm_version()})
    TABLE.write_text(f'{version[:-1]}, "families": [\n{lines}\n]}}\n', encoding="utf-8")


def main(names: Sequence[str]) -> None:
    """Sweep the named families, or all, and write the table after each; or answer the questions in stdin."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
    plain = engine_spec(Path(__file__).parent / "unit" / "plain_model", "float32", ["q_proj"])
    os.environ |= {n: v for n, v in VllmLauncher().environment(plain).items() if n != "LD_PRELOAD"}
    import vllm.entrypoints.llm
    import vllm.v1.worker.cpu_model_runner  # noqa: F401 imported for the forks

    import tests.cases  # noqa: F401 as above

    if names == ["-"]:
        for model, adapters, dtype, kinds in json.load(sys.stdin):
            work = partial(engine_side, Path(model), Path(adapters), dtype, kinds)
            print(json.dumps(ask(work, "ends with the tiny model")), flush=True)
        return
    done = dict(read_cpu_families()) if TABLE.exists() else {}
    for family in swept_families():
        if names and family.name not in names:
            continue
        try:
            found = measure(family)
        except Refused as refusal:
            found = replace(family, refused=str(refusal))
        print(json.dumps(asdict(found)), flush=True)
        done[family.architecture] = found
        write_table(done.values())


if __name__ == "__main__":
    main(sys.argv[1:])
