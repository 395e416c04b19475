"""Memory budgets on stub machines, and predictions computed by hand."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from skylite.config.resolved import MemoryPlan
from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.model_sizes import model_sizes
from skylite.engine.start_engines import engine_spec
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.memory import engine_memory
from skylite.errors import ConfigError
from skylite.model.chunked_logprobs import BLOCK_ROWS, BLOCK_VOCAB, HEAD_CHUNK_ELEMENTS
from skylite.notes import Note
from skylite.processes.gpus import visible_gpus
from skylite.resources.gpu_memory_plan import (
    HEAD_BLOCK_ROWS,
    HEAD_BLOCK_VOCAB,
    HEAD_CHUNK,
    Setup,
    decode_whole_steps,
    kv_cache_bytes,
    most_tokens,
    plan_memory,
    trainer_memory,
)
from skylite.resources.gpu_placement import place
from tests.decisions import changed
from tests.unit.gpu_cases import H200, RESOLVED, T4, Machine

HIDDEN, INNER, KEYS, VOCAB, LAYERS, RANK = 64, 192, 32, 500, 3, 4
LAYER = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (KEYS, HIDDEN),
    "self_attn.v_proj": (KEYS, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
    "mlp.down_proj": (HIDDEN, INNER),
}
MIB, GIB = 2**20, 2**30
TOTAL = 143771 * 2**20
"""Of the stub H200."""
FREE = TOTAL - 4 * 2**20
"""The driver uses the rest."""


def model(folder: Path, factor: int = 1) -> Path:
    """A model folder with a Llama's shapes, each `factor` times as large, in a file with holes."""
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in LAYER.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    if factor == 1:
        tensors = {name: np.zeros(shape, dtype=np.float16) for name, shape in shapes.items()}
        save_file(tensors, folder / "model.safetensors")
        return folder
    header, end = {}, 0
    for name, shape in shapes.items():
        large = [size * factor for size in shape]
        start, end = end, end + 2 * int(np.prod(large))
        header[name] = {"dtype": "BF16", "shape": large, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return folder


def config(**sections: Any) -> TrainConfig:
    tree = {
        "lora": {"rank": RANK, "alpha": 8},
        "rollout": {"max_prompt_tokens": 100, "max_completion_tokens": 100},
    }
    return TrainConfig.model_validate(tree | sections)


def plan(
    machine: Machine, gpus: list[str], folder: Path, settings: TrainConfig
) -> tuple[MemoryPlan, list[Note]]:
    machine.lists(*gpus)
    machine.has_torch()
    return plan_memory(
        settings, Setup(VllmLauncher(), folder, "cuda", "bfloat16", "dense", place(settings, "cuda"))
    )


def test_a_rank_is_predicted_from_the_shapes(tmp_path: Path) -> None:
    sizes = model_sizes(model(tmp_path / "m"), config().lora)
    per_layer = 2 * HIDDEN * HIDDEN + 2 * KEYS * HIDDEN + 3 * INNER * HIDDEN + 2 * HIDDEN
    assert sizes.parameters == VOCAB * HIDDEN + HIDDEN + LAYERS * per_layer
    per_rank = 2 * (2 * HIDDEN) + 2 * (HIDDEN + KEYS) + 3 * (HIDDEN + INNER)
    assert sizes.lora == RANK * LAYERS * per_rank

    found = trainer_memory(sizes, config(), "cpu", "float32")
    assert found.weights == 2 * sizes.parameters, "stored in bfloat16"
    assert found.adapter == 7 * 4 * sizes.lora
    # Of each layer: two norm inputs, q, k, v, attention's output, gate, up, x A^T of 7 modules. A head has
    # one normalizer, each norm one scale.
    kept = 2 * HIDDEN + 2 * HIDDEN + 2 * KEYS + 2 * INNER + 7 * RANK
    assert found.kept == 4 * (LAYERS * (kept + 2 + 1) + 3 * HIDDEN)
    assert found.work == 9 * INNER * 4
    assert found.mask == 4 * 200 * 200, "of the longest trajectory"
    # TBB's allocator keeps what the head freed while layers are computed.
    passes = 1000 * (found.kept + found.work) + found.head + found.mask
    assert found.total(1000) == found.state() + int(passes)
    assert found.total(1000, 9000) == found.total(1000), "a CPU keeps no copies"

    more = trainer_memory(sizes, config(trainer={"checkpointing": "none"}), "cpu", "float32")
    assert more.kept - found.kept == 4 * LAYERS * (2 * HIDDEN + INNER)
    less = trainer_memory(sizes, config(trainer={"checkpointing": "full"}), "cpu", "float32")
    assert less.kept == 4 * (LAYERS + 3) * HIDDEN


@pytest.mark.parametrize(("ranks", "offload"), [(1, False), (3, False), (1, True), (3, True)])
def test_fsdp_gathers_two_layers_and_all_outside_of_layers(tmp_path: Path, ranks: int, offload: bool) -> None:
    sizes = model_sizes(model(tmp_path / "m"), config().lora)
    settings = config(trainer={"num_ranks": ranks, "offload": offload})
    layer = (sizes.parameters - VOCAB * HIDDEN - HIDDEN) // LAYERS
    shard = 0 if offload else 2 * sizes.parameters // ranks
    gathered = 2 * (2 * layer + VOCAB * HIDDEN + HIDDEN) if ranks > 1 or offload else 0
    found = trainer_memory(sizes, settings, "cuda", "bfloat16")
    assert found.weights == shard + gathered
    # Parameters, gradients and the parameters before; moments, now and before, unless they are offloaded.
    assert found.adapter == (3 if offload else 7) * 4 * sizes.lora


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
def test_a_gpu_keeps_keys_and_values_for_each_head_and_piece(tmp_path: Path, checkpointing: str) -> None:
    sizes, trainer = model_sizes(model(tmp_path / "m"), config().lora), {"checkpointing": checkpointing}
    found = trainer_memory(sizes, config(trainer=trainer), "cuda", "bfloat16")
    tokens = 10_000_000  # so many that the head does not count
    layers = LAYERS if checkpointing == "selective" else 1
    assert found.total(tokens, 9000) - found.total(tokens) == layers * 9000 * 2 * HIDDEN * 2
    flex = trainer_memory(sizes, config(trainer=trainer | {"attention": "flex"}), "cuda", "bfloat16")
    assert flex.total(tokens, 9000) == flex.total(tokens)
    assert flex.mask == 0


def test_bfloat16_keeps_a_rounded_adapter_until_backward(tmp_path: Path) -> None:
    sizes = model_sizes(model(tmp_path / "m"), config().lora)

    def predicted(checkpointing: str, dtype: str) -> int:
        return trainer_memory(sizes, config(trainer={"checkpointing": checkpointing}), "cuda", dtype).cast

    assert predicted("selective", "bfloat16") == predicted("none", "bfloat16") == 2 * sizes.lora
    assert predicted("full", "bfloat16") == predicted("none", "float32") == 0


def test_on_a_gpu_the_layers_reuse_the_memory_of_the_head(tmp_path: Path) -> None:
    found = trainer_memory(model_sizes(model(tmp_path / "m"), config().lora), config(), "cuda", "bfloat16")
    kept = found.state() + found.cast + found.mask
    assert found.total(1000) == kept + int(1000 * found.kept) + found.head
    assert found.total(10**8) == kept + int(10**8 * (found.kept + found.work))


def test_the_scratch_of_the_head_is_that_of_its_chunks_or_blocks(tmp_path: Path) -> None:
    assert HEAD_CHUNK_ELEMENTS == HEAD_CHUNK
    assert (BLOCK_ROWS, BLOCK_VOCAB) == (HEAD_BLOCK_ROWS, HEAD_BLOCK_VOCAB)
    sizes = model_sizes(model(tmp_path / "m"), config().lora)
    heads = {dtype: trainer_memory(sizes, config(), "cpu", dtype).head for dtype in ("float32", "bfloat16")}
    assert heads == {"float32": 4 * (4 * 512 * 2048 + 2048 * HIDDEN), "bfloat16": 4 * 4 * 2**22}


def test_an_engine_is_predicted_from_the_shapes(tmp_path: Path) -> None:
    sizes = model_sizes(model(tmp_path / "m"), config().lora)
    found = engine_memory(sizes, config(), "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    assert found.weights == 2 * sizes.parameters
    assert found.lora_slots == 2 * 2 * 8 * sizes.lora_per_rank, "vLLM rounds rank 4 up to 8"
    assert found.kv_per_token == 2 * 2 * KEYS * LAYERS


@pytest.mark.parametrize("gpus", [1, 2])
def test_engine_and_trainer_together_fit_the_gpu(machine: Machine, tmp_path: Path, gpus: int) -> None:
    settings = config(engine={"gpu_memory_utilization": 0.4})
    folder = model(tmp_path / "m", 40)
    budget, notes = plan(machine, [H200] * gpus, folder, settings)
    sizes = model_sizes(folder, settings.lora)
    engine = engine_memory(sizes, settings, "cuda", "bfloat16", max_loras=1, cpu_lora="dense")
    trainer = trainer_memory(sizes, settings, "cuda", "bfloat16")
    assert budget.kv_cache_bytes is not None
    assert budget.trainer_bytes is not None
    # 128 sequences of 200 tokens in 4 blocks of 64, and the block that vLLM holds back.
    assert budget.kv_cache_bytes == (128 * 4 + 1) * 64 * engine.kv_per_token
    used = engine.before_kv() + budget.kv_cache_bytes
    assert budget.trainer_bytes + trainer.process == FREE - (used if gpus == 1 else 0)
    assert str(notes[0]).startswith(f"memory of an engine: {used / GIB:.1f} GiB (weights ")


def test_one_sequence_fits_beside_the_block_that_vllm_holds_back(tmp_path: Path) -> None:
    """vLLM refuses to start with a smaller cache. 200 tokens are 4 blocks of 64, and another."""
    settings = config(engine={"max_num_seqs": 1, "gpu_memory_utilization": 0.5})
    sizes = model_sizes(model(tmp_path / "m"), settings.lora)
    predicted = engine_memory(sizes, settings, "cuda", "bfloat16", max_loras=1, cpu_lora="dense")
    engine = dataclasses.replace(predicted, kv_per_token=MIB)
    needed = 5 * 64 * MIB
    assert kv_cache_bytes(settings, engine, 2 * (engine.before_kv() + needed)) == needed
    assert kv_cache_bytes(settings, engine, TOTAL) == needed
    with pytest.raises(ConfigError, match=r"one sequence of 200 tokens needs a KV cache of 0\.3 GiB\."):
        kv_cache_bytes(settings, engine, 2 * (engine.before_kv() + needed) - 2)


def test_two_engines_beside_a_rank_leave_it_less(machine: Machine, tmp_path: Path) -> None:
    folder = model(tmp_path / "m", 40)
    one, two = (
        plan(machine, [H200], folder, config(engine={"num_engines": n, "gpu_memory_utilization": 0.3}))[0]
        for n in (1, 2)
    )
    assert one.kv_cache_bytes == two.kv_cache_bytes
    assert one.trainer_bytes is not None
    assert two.trainer_bytes is not None
    assert TOTAL - two.trainer_bytes > 1.8 * (TOTAL - one.trainer_bytes) - 2 * GIB


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_rank_gets_what_others_and_the_driver_leave_free(
    machine: Machine, tmp_path: Path, gpus: int
) -> None:
    """On two GPUs, rank 0 has GPU 0 for itself, and the others are there."""
    folder, used = model(tmp_path / "m", 40), [30_000, 4][:gpus]
    alone, _ = plan(machine, [H200] * gpus, folder, config())
    machine.lists(*[H200] * gpus, used_mib=used, reserved_mib=600, processes=["41, 29000, python3"])
    placement = place(config(), "cuda")
    beside, _ = plan_memory(config(), Setup(VllmLauncher(), folder, "cuda", "bfloat16", "dense", placement))
    assert "warning: GPU 0 (NVIDIA H200) is not free: process 41 (python3) uses 28.3 GiB" in map(
        str, placement.notes
    )
    assert alone.trainer_bytes is not None
    assert beside.trainer_bytes == alone.trainer_bytes - (30_000 - 4 + 600) * 2**20
    assert beside.kv_cache_bytes == alone.kv_cache_bytes


def test_a_rank_that_others_leave_too_little_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.lists(H200, H200, used_mib=[143_000, 4], processes=["41, 142900, python3"])
    machine.has_torch()
    placement = place(config(), "cuda")
    folder = model(tmp_path / "m", 40)
    with pytest.raises(ConfigError, match=r"on GPU 0 .* and 0\.8 GiB are left; process 41 \(python3\) uses"):
        plan_memory(config(), Setup(VllmLauncher(), folder, "cuda", "bfloat16", "dense", placement))


def test_the_kv_cache_gets_what_is_left_of_a_small_share(machine: Machine, tmp_path: Path) -> None:
    settings = config(
        engine={"gpu_memory_utilization": 0.035},
        rollout={"max_prompt_tokens": 8000, "max_completion_tokens": 8000},
    )
    folder = model(tmp_path / "m", 40)
    budget, _ = plan(machine, [H200], folder, settings)
    engine = engine_memory(
        model_sizes(folder, settings.lora), settings, "cuda", "bfloat16", max_loras=1, cpu_lora="dense"
    )
    assert budget.kv_cache_bytes == int(0.035 * TOTAL) - engine.before_kv()


@pytest.mark.parametrize(
    ("card", "factor", "sections", "reason"),
    [
        (
            T4,
            100,
            {"engine": {"gpu_memory_utilization": 0.1}},
            r"The engine does not fit: .*=0.1 of 15.0 GiB is 1.5 GiB; weights",
        ),
        (
            T4,
            50,
            {
                "rollout": {"max_prompt_tokens": 1000, "max_completion_tokens": 30000},
                "engine": {"max_num_seqs": 1},
            },
            r"The trainer does not fit on GPU 0 \(Tesla T4\) beside 1 engine\(s\): a trajectory of 31000",
        ),
    ],
)
def test_a_run_that_cannot_fit_is_refused(
    machine: Machine, tmp_path: Path, card: str, factor: int, sections: dict[str, Any], reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        plan(machine, [card], model(tmp_path / "m", factor), config(**sections))


def test_a_gpu_of_unknown_size_has_no_budget(machine: Machine, tmp_path: Path) -> None:
    budget, notes = plan(
        machine, ["NVIDIA GB10, 12.1, [N/A], 580.95.05, [N/A]"], model(tmp_path / "m"), config()
    )
    assert (budget.kv_cache_bytes, budget.trainer_bytes) == (None, None)
    assert str(notes[0]).startswith("warning: memory: nvidia-smi does not tell the size of a GPU")


@pytest.mark.parametrize(
    ("prompts", "engine", "most"),
    [
        (16, {}, 128),
        (32, {}, 256),
        (33, {"num_engines": 2}, 132),
        (100, {}, 512),
        (100, {"max_num_seqs": 200}, 200),
    ],
)
def test_an_engine_decodes_whole_steps_at_once(
    machine: Machine, tmp_path: Path, prompts: int, engine: dict[str, Any], most: int
) -> None:
    chosen, note = more_sequences(machine, model(tmp_path / "m", 20), prompts, engine)
    assert chosen.engine.max_num_seqs == most
    assert note.startswith(f"engine.max_num_seqs={most}: ") == (most > 128 and not engine.get("max_num_seqs"))


@pytest.mark.parametrize(("held", "most"), [(160, 160), (129, 129), (128, 128), (100, 128), (-10, 128)])
def test_no_more_sequences_than_the_kv_cache_holds(
    machine: Machine, tmp_path: Path, held: int, most: int
) -> None:
    """256 sequences a step. Less than nothing is left: the plan itself refuses the run."""
    folder = model(tmp_path / "m", 20)
    memory = VllmLauncher().memory(config(engine={"max_num_seqs": 256}), folder, "cuda", "bfloat16", "dense")
    # 1,000 tokens are 16 blocks of 64; one byte for the rounding of the share.
    share = (memory.before_kv() + (held * 16 + 1) * 64 * memory.kv_per_token + 1) / TOTAL
    chosen, _ = more_sequences(machine, folder, 32, {"gpu_memory_utilization": share})
    assert chosen.engine.max_num_seqs == most


def test_the_trainer_keeps_memory_for_its_micro_batches(machine: Machine, tmp_path: Path) -> None:
    """On one GPU, where a larger KV cache takes from the trainer."""
    folder, rollout = model(tmp_path / "m", 40), {"prompts_per_step": 64, "group_size": 8}
    rollout |= {"max_prompt_tokens": 1000, "max_completion_tokens": 2000}

    def fitting(sequences: int) -> int:
        settings = config(rollout=rollout, engine={"max_num_seqs": sequences})
        trainer = trainer_memory(model_sizes(folder, settings.lora), settings, "cuda", "bfloat16")
        left = plan(machine, [H200], folder, settings)[0].trainer_bytes
        assert left is not None
        return most_tokens(settings, trainer, left + trainer.process)

    def chosen(tokens: int) -> int:
        settings = config(rollout=rollout, trainer={"tokens_per_micro_batch": tokens})
        gpus = place(settings, "cuda")
        raised, _ = decode_whole_steps(
            settings, Setup(VllmLauncher(), folder, "cuda", "bfloat16", "dense", gpus)
        )
        return raised.engine.max_num_seqs

    assert fitting(512) < fitting(128)
    assert [chosen(fitting(512)), chosen(fitting(512) + 1)] == [512, 128]


def more_sequences(
    machine: Machine, folder: Path, prompts: int, engine: dict[str, Any]
) -> tuple[TrainConfig, str]:
    """decode_whole_steps with 8 sequences of 1,000 tokens for each prompt, on two GPUs."""
    rollout = {"prompts_per_step": prompts, "group_size": 8, "max_prompt_tokens": 800}
    settings = config(rollout=rollout | {"max_completion_tokens": 200}, engine=engine)
    machine.lists(H200, H200)
    machine.has_torch()
    gpus = place(settings, "cuda")
    return decode_whole_steps(settings, Setup(VllmLauncher(), folder, "cuda", "bfloat16", "dense", gpus))


@pytest.mark.parametrize("staleness", [0, 1])
def test_an_engine_has_a_slot_for_each_version_that_is_sampled(staleness: int, tmp_path: Path) -> None:
    """And memory for one more, which vLLM keeps outside of its slots."""
    settings = config(rollout={"max_staleness": staleness})
    folder = model(tmp_path / "m")
    resolved = changed(RESOLVED, model={"path": folder})
    run_config = RunConfig(skylite_version="1", config=settings, resolved=resolved)
    command = VllmLauncher().command(engine_spec(run_config, ["q_proj"], 0, tmp_path))
    slots, loaded = (int(command[command.index(f) + 1]) for f in ("--max-loras", "--max-cpu-loras"))
    assert (slots, loaded) == (1 + staleness, 2 + staleness)
    memory = VllmLauncher().memory(settings, folder, "cuda", "bfloat16", "dense")
    of_one = engine_memory(
        model_sizes(folder, settings.lora), settings, "cuda", "bfloat16", max_loras=1, cpu_lora="dense"
    )
    assert memory.lora_slots == slots * of_one.lora_slots


def test_vllm_is_started_with_the_budget(machine: Machine, tmp_path: Path) -> None:
    machine.lists(H200)
    assert visible_gpus()
    memory = {"kv_cache_bytes": 123456789, "engine_share": 0.0123}
    resolved = changed(RESOLVED, memory=memory, model={"path": model(tmp_path / "m")})
    run_config = RunConfig(skylite_version="1", config=config(), resolved=resolved)
    command = VllmLauncher().command(engine_spec(run_config, ["q_proj"], 0, tmp_path))
    assert command[command.index("--kv-cache-memory-bytes") + 1] == "123456789"
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.0123"
