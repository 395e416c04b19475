"""One engine on several GPUs: its placement, flags and memory, and each refusal."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skylite.adapters.folder import ServedAdapter
from skylite.config.provenance import NOTHING_TYPED
from skylite.config.train import RunConfig, TrainConfig
from skylite.engine import tensor_parallel
from skylite.engine.connections import Address
from skylite.engine.model_sizes import model_sizes
from skylite.engine.start_engines import engine_config, engine_spec, single_engine_spec
from skylite.engine.tensor_parallel import check_divisible
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.memory import engine_memory
from skylite.errors import ConfigError
from skylite.resources.gpu_memory_plan import Setup, plan_memory
from skylite.resources.gpu_placement import place
from skylite.run.run_dir import AdapterVersion
from tests.decisions import changed
from tests.settings import typed
from tests.unit.gpu_cases import H200, RESOLVED, Machine
from tests.unit.test_gpu_memory_plan import FREE, RANK, config
from tests.unit.test_sharded_sizes import headed

QWEN_72B = {
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "intermediate_size": 29568,
    "vocab_size": 152064,
}


@pytest.mark.parametrize(
    ("gpus", "ranks", "engines", "size", "engine_gpus"),
    [
        (8, 4, 1, 4, [4, 5, 6, 7]),
        (8, 4, 2, 2, [4, 5, 6, 7]),
        (4, 1, 1, 4, [1, 2, 3, 0]),
        (2, 2, 2, 2, [0, 1, 0, 1]),
        (3, 2, 1, 2, [2, 0]),
    ],
)
def test_an_engine_gets_as_many_gpus(
    machine: Machine, gpus: int, ranks: int, engines: int, size: int, engine_gpus: list[int]
) -> None:
    machine.lists(*[H200] * gpus)
    machine.has_torch()
    settings = {"num_engines": engines, "tensor_parallel": size}
    placed = place(config(trainer={"num_ranks": ranks}, engine=settings), "cuda")
    assert placed.engine_gpus == engine_gpus


def test_the_plan_shows_which_gpus_share_a_model(machine: Machine) -> None:
    machine.lists(*[H200] * 6)
    machine.has_torch()
    engine = {"num_engines": 2, "tensor_parallel": 2, "gpus": [5, 4, 0, 3]}
    placed = place(config(engine=engine), "cuda")
    assert placed.notes[1].text == (
        "rank 0 on GPU 0; engine 0 to 1 on GPU 5+4, 0+3 (tensor parallel, 2 GPUs each)"
    )


def test_each_engine_sees_its_gpus_only(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    resolved = changed(RESOLVED, placement={"engine_gpus": [4, 5, 6, 7]}, model={"path": tmp_path})
    tree = {"engine": {"num_engines": 2, "tensor_parallel": 2}}
    run_config = RunConfig(skylite_version="1", config=TrainConfig.model_validate(tree), resolved=resolved)
    specs = [engine_spec(run_config, ["q_proj"], i, Path("sockets")) for i in range(2)]
    assert [VllmLauncher().environment(spec)["CUDA_VISIBLE_DEVICES"] for spec in specs] == ["4,5", "6,7"]
    for spec in specs:
        command = VllmLauncher().command(spec)
        assert command[command.index("--tensor-parallel-size") + 1] == "2"


@pytest.mark.parametrize(
    ("engine", "reason", "remedy"),
    [
        (
            {"tensor_parallel": 3},
            r"engine.tensor_parallel=3 needs 3 GPUs for each engine, and 2 can be used: GPU 0: NVIDIA H200, ",
            "Use engine.tensor_parallel=2",
        ),
        (
            {"tensor_parallel": 2, "gpus": [0]},
            r"engine.gpus=\[0\] names 1 GPU\(s\) for engine.num_engines=1 and engine.tensor_parallel=2\.",
            "Name 2, 2 for each engine",
        ),
        (
            {"tensor_parallel": 2, "gpus": [1, 1]},
            r"engine.gpus=\[1, 1\] names a GPU twice for one engine: \[1, 1\]\.",
            "Name 2 different GPUs",
        ),
        (
            {"tensor_parallel": 2, "num_engines": 3},
            "3 engines share GPU 1 .*gpu_memory_utilization=0.45",
            "below 0.33",
        ),
    ],
)
def test_a_wrong_number_of_gpus_is_refused(
    machine: Machine, engine: dict[str, Any], reason: str, remedy: str
) -> None:
    machine.lists(H200, H200)
    machine.has_torch()
    with pytest.raises(ConfigError, match=reason) as error:
        place(config(engine=engine), "cuda")
    assert remedy in error.value.hint
    assert error.value.exit_code == 2


def test_too_little_shared_memory_is_refused(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Docker gives a container 64 MiB."""
    machine.lists(H200, H200)
    machine.has_torch()
    monkeypatch.setattr(tensor_parallel, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(tensor_parallel, "disk_usage", lambda _: SimpleNamespace(free=64 << 20))
    with pytest.raises(ConfigError, match=r"=2 needs 240 MiB in .* workers, and 64 MiB are free\.") as error:
        place(config(engine={"tensor_parallel": 2}), "cuda")
    assert "--shm-size" in error.value.hint
    assert place(config(), "cuda").engine_gpus == [1], "one process needs no queues"


def test_a_cpu_has_one_process_per_engine() -> None:
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel=2 divides a model among GPUs, and this"):
        place(config(engine={"tensor_parallel": 2}), "cpu")


@pytest.mark.parametrize(
    ("changes", "gpus", "reason", "remedy"),
    [
        ({}, 16, "", ""),
        ({}, 3, "num_attention_heads=64 must be a multiple of it", "=2."),
        (
            {"num_attention_heads": 24, "num_key_value_heads": 4},
            6,
            "num_key_value_heads=4 must be",
            "=4 or 2.",
        ),
        ({"intermediate_size": 29570}, 4, "intermediate_size=29570 must be a multiple of it", "=2."),
        ({"moe_intermediate_size": 770}, 4, "moe_intermediate_size=770 must be a multiple of it", "=2."),
        (
            {"num_attention_heads": 60, "num_key_value_heads": 60, "intermediate_size": 600},
            5,
            "vocab_size=152064, padded to 152064, must be a multiple of it",
            "=4 or 3 or 2.",
        ),
        ({"kv_lora_rank": 512, "num_key_value_heads": 5}, 8, "", ""),
        ({"num_attention_heads": 7, "num_key_value_heads": 1}, 2, "num_attention_heads=7", "=1."),
    ],
)
def test_a_model_that_vllm_cannot_divide_is_refused(
    tmp_path: Path, changes: dict[str, int], gpus: int, reason: str, remedy: str
) -> None:
    """vLLM 0.32: verify_with_parallel_config, QKVParallelLinear, FusedMoEConfig, VocabParallelEmbedding."""
    for section in ("", "text_config"):
        tree = QWEN_72B | changes
        (tmp_path / "config.json").write_text(json.dumps({section: tree} if section else tree))
        if not reason:
            check_divisible(tmp_path, gpus)
            continue
        with pytest.raises(ConfigError) as error:
            check_divisible(tmp_path, gpus)
        assert f"engine.tensor_parallel={gpus} does not divide {tmp_path.name}: {reason}" in error.value.what
        assert error.value.hint == f"Use engine.tensor_parallel{remedy}"


def test_ranks_and_a_divided_engine_share_their_gpus(machine: Machine, tmp_path: Path) -> None:
    """Engine on GPU 1 and 0, ranks on 0 and 1: each GPU gives up one part of the engine."""
    machine.lists(H200, H200)
    machine.has_torch()
    settings = config(trainer={"num_ranks": 2}, engine={"tensor_parallel": 2})
    folder = headed(tmp_path / "m", 40, num_attention_heads=320, num_key_value_heads=160)
    placement = place(settings, "cuda")
    budget, notes = plan_memory(
        settings, Setup(VllmLauncher(), folder, "cuda", "bfloat16", "dense", placement)
    )
    sizes = model_sizes(folder, settings.lora)
    engine = engine_memory(sizes, settings, "cuda", "bfloat16", max_loras=1, cpu_lora="dense")
    assert budget.kv_cache_bytes == (128 * 4 + 1) * 64 * engine.kv_per_token, "blocks of 64 tokens"
    assert budget.trainer_bytes is not None
    assert budget.trainer_bytes + (1 << 30) == FREE - engine.before_kv() - budget.kv_cache_bytes
    assert notes[0].text.startswith("memory of an engine on each of its 2 GPUs: ")


def test_a_run_whose_model_cannot_be_divided_is_refused(machine: Machine, tmp_path: Path) -> None:
    machine.lists(H200, H200, H200)
    machine.has_torch()
    settings = config(engine={"tensor_parallel": 3})
    with pytest.raises(
        ConfigError, match=r"engine.tensor_parallel=3 does not divide m: num_attention_heads=8"
    ):
        plan_memory(
            settings,
            Setup(
                VllmLauncher(), headed(tmp_path / "m"), "cuda", "bfloat16", "dense", place(settings, "cuda")
            ),
        )


def test_eval_and_serve_divide_the_model_as_the_run_did(
    machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(VllmLauncher, "check_machine", lambda self, device: None)
    machine.lists(H200, H200, H200)
    machine.has_torch()
    machine.sees("2,0")
    folder, settings = headed(tmp_path / "m"), config(engine={"tensor_parallel": 2})
    spec = single_engine_spec(VllmLauncher(), settings, None, folder, Address("unix:s"))
    assert (spec.gpus, spec.tensor_parallel) == ((2, 0), 2)
    machine.sees("1")
    with pytest.raises(ConfigError, match=r"engine.tensor_parallel=2 needs 2 GPUs .* and 1 can be used"):
        single_engine_spec(VllmLauncher(), settings, None, folder, Address("unix:s"))
    machine.sees("-1")
    with caplog.at_level(logging.INFO):
        spec = single_engine_spec(VllmLauncher(), settings, None, folder, Address("unix:s"))
    assert (spec.gpus, spec.tensor_parallel) == ((), 1)
    assert "engine.tensor_parallel=2 is for GPUs" in caplog.text


def test_set_changes_the_gpus_of_a_served_run() -> None:
    recorded = RunConfig(skylite_version="1", config=config(engine={"tensor_parallel": 8}), resolved=RESOLVED)
    served = ServedAdapter(
        adapter=AdapterVersion(1, Path("policy-v000001")),
        base_model="model",
        rank=RANK,
        target_modules=["q_proj"],
        is_on_tower=False,
        run=None,
        run_config=recorded,
    )
    assert engine_config(served, NOTHING_TYPED, "serve") is recorded.config
    assert engine_config(served, typed({"engine.tensor_parallel": 2}), "serve").engine.tensor_parallel == 2
