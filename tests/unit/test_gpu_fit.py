"""`skylite plan`: what fits on described GPUs is what a run on such GPUs plans, and the command says so."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skylite.cli.plan import checked_setup, memory_of_run, plan_config, table
from skylite.config.provenance import from_command_line
from skylite.config.train import RunConfig, TrainConfig
from skylite.engine.model_sizes import model_sizes
from skylite.engine.start_engines import engine_spec
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.hub.outline import model_or_outline, write_quantised
from skylite.processes.hosts import TrainerStart
from skylite.processes.torchrun import trainer_command
from skylite.resources.gpu_fit import GIB, Fit, attempts, best_fit, described_gpus, with_settings
from skylite.resources.gpu_memory_plan import Setup, fit_memory
from skylite.resources.gpu_placement import place
from skylite.rollout.plan import RunPlan
from skylite.run.run_dir import RunDir
from tests.decisions import resolved
from tests.tiny_models import tiny_config
from tests.unit.bad_inputs import Reply, call
from tests.unit.doc_scripts import script
from tests.unit.gpu_cases import Machine
from tests.unit.test_vllm_flags import KNOWN

H100 = "NVIDIA H100 80GB HBM3, 9.0, 81920, 580.95.05, Disabled"
"""With 80 GiB."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders with the shapes of Qwen2.5's sizes."""
    folder = tmp_path_factory.mktemp("shapes")
    for shape in ("0.5B", "7B", "14B", "32B", "72B"):
        script("generate_gpu_fit").write_shapes(folder, shape)
    return folder


def fit(model: Path, gpus: str, *settings: str) -> Fit:
    config, _ = plan_config(None, from_command_line(settings), 2048)
    found = best_fit(config, checked_setup(config, model), described_gpus(gpus))
    assert isinstance(found, Fit), found
    return found


@pytest.mark.parametrize(
    ("shape", "gpus", "ranks", "engines", "settings"),
    [
        ("0.5B", "24", [0], [0], {}),
        ("7B", "1x80", [0], [0], {}),
        ("7B", "2x80", [0], [1], {"engine.gpu_memory_utilization": 0.9}),
        (
            "14B", "4x48", [0, 1], [2, 3],
            {"trainer.num_ranks": 2, "engine.num_engines": 2, "engine.gpu_memory_utilization": 0.9},
        ),
        (
            "32B", "2x80", [0, 1], [0, 1],
            {
                "trainer.num_ranks": 2, "engine.tensor_parallel": 2,
                "engine.gpu_memory_utilization": 0.55, "engine.sleep": "weights",
            },
        ),
        (
            "72B", "8x80", [0, 1, 2, 3], [4, 5, 6, 7],
            {"trainer.num_ranks": 4, "engine.tensor_parallel": 4, "engine.gpu_memory_utilization": 0.9},
        ),
    ],
)  # fmt: skip
def test_placement_and_the_arguments_of_vllm_and_torchrun(
    models: Path, shape: str, gpus: str, ranks: list[int], engines: list[int], settings: dict[str, Any]
) -> None:
    found = fit(models / shape, gpus)
    assert (found.placement.rank_gpus, found.placement.engine_gpus) == (ranks, engines)
    assert found.placement.kind == ("shared" if ranks == engines else "split")
    assert found.settings == settings
    for gpu in {*ranks, *engines}:
        parts = found.parts(gpu)
        if found.config.engine.lends is None:  # with turns, test_sleeping_engine.py counts
            assert sum(parts.values()) == found.placement.gpus[gpu].total_bytes
        assert min(parts.values()) >= 0, "what is predicted fits"
    on_gpus = {"device": "cuda", "dtype": "bfloat16", "rank_gpus": ranks, "engine_gpus": engines}
    memory = found.memory.model_dump()
    run = RunConfig(
        skylite_version="1",
        config=found.config,
        resolved=resolved(models / shape, models, placement=on_gpus, memory=memory),
    )
    size = settings.get("engine.tensor_parallel", 1)
    share = settings.get("engine.gpu_memory_utilization", 0.45)
    for index in range(found.config.engine.num_engines):
        spec = engine_spec(run, ["q_proj"], index, models)
        words = VllmLauncher().command(spec)
        values = dict(itertools.pairwise(words))
        assert values["--tensor-parallel-size"] == str(size)
        assert 0 < float(values["--gpu-memory-utilization"]) <= share
        assert values["--kv-cache-memory-bytes"] == str(found.memory.kv_cache_bytes)
        assert values["--max-model-len"] == "2048"
        assert {w.replace("--no-", "--") for w in words if w.startswith("--")} <= {*KNOWN["flags"]}
        assert list(spec.gpus) == engines[index * size : (index + 1) * size]
    start = TrainerStart("x", resume=False)
    torchrun = trainer_command(models, models, found.config.trainer.num_ranks, start)
    assert torchrun[torchrun.index("--nproc-per-node") + 1] == str(len(ranks))


def test_the_bytes_of_a_divided_model(models: Path) -> None:
    """72,706,203,648 parameters in bfloat16. A rank of four gathers two layers, and embeddings and head."""
    found = fit(models / "72B", "8x80")
    assert found.parts(4)["vLLM: weights"] == 72_706_203_648 * 2 // 4
    layer = 2 * 8192**2 + 2 * 1024 * 8192 + 8192 + 2 * 1024 + 3 * 29568 * 8192 + 2 * 8192
    outside = 2 * 152064 * 8192 + 8192
    assert 80 * layer + outside == 72_706_203_648
    assert found.parts(0)["trainer: weights"] == 72_706_203_648 * 2 // 4 + (2 * layer + outside) * 2
    sides = 2 * (8192 + 8192) + 2 * (8192 + 1024) + 3 * (8192 + 29568)
    # float32: parameters, gradient and two moments, and a copy of all but the gradient during an update.
    assert found.parts(0)["trainer: adapter, gradient, AdamW"] == 80 * 32 * sides * 7 * 4


def test_two_machines_divide_the_base_among_their_ranks(models: Path) -> None:
    reply = plan(models / "72B", "--gpus", "2x8x80", "--tokens", "2048", "--json")
    facts = json.loads(reply.out)
    assert facts["gpus"] == "2 machines with 8 GPUs of 80 GiB each"
    found = facts["plan"]
    assert (found["rank_gpus"], found["engine_gpus"]) == ([0, 1, 2, 3], [4, 5, 6, 7])
    layer = 2 * 8192**2 + 2 * 1024 * 8192 + 8192 + 2 * 1024 + 3 * 29568 * 8192 + 2 * 8192
    outside = 2 * 152064 * 8192 + 8192
    shard = 72_706_203_648 * 2 // (2 * 4)
    assert found["bytes"]["0"]["trainer: weights"] == shard + (2 * layer + outside) * 2
    assert found["bytes"]["4"]["vLLM: weights"] == 72_706_203_648 * 2 // 4, "on the first machine alone"
    assert found["others"].startswith(
        "8 ranks in all: each other machine has ranks on GPU 0-3 (skylite worker"
    )
    assert found["others"].endswith("Its GPU 4-7 can serve: start vLLM there, and name it in engine.urls.")
    assert "--set trainer.hosts=2 --set 'trainer.interface=\"INTERFACE\"'" in found["command"]
    words = [word.replace("INTERFACE", "eth1") for word in shlex.split(found["command"])[2:]]
    again = json.loads(call(["plan", "--gpus", "2x8x80", "--json", *words]).out)
    assert again["plan"]["bytes"] == found["bytes"]


@pytest.mark.parametrize(("shape", "count"), [("7B", 1), ("14B", 4), ("72B", 8)])
def test_a_run_on_such_gpus_plans_the_same(
    machine: Machine, models: Path, tmp_path: Path, shape: str, count: int
) -> None:
    found = fit(models / shape, f"{count}x80")
    machine.lists(*[H100] * count, used_mib=0)
    machine.has_torch()
    config, _ = plan_config(None, from_command_line(()), 2048)
    config = with_settings(config, found.settings)
    choice = place(config, "cuda")
    setup = Setup(VllmLauncher(), models / shape, "cuda", "bfloat16", "dense", choice)
    assert fit_memory(config, setup) == (found.config, found.memory, found.notes)
    assert (choice.rank_gpus, choice.engine_gpus) == (found.placement.rank_gpus, found.placement.engine_gpus)
    on_gpus = {"device": "cuda", "dtype": "bfloat16", "rank_gpus": choice.rank_gpus}
    plan = RunPlan(
        run=RunDir(tmp_path / "run"),
        config=found.config,
        resolved=resolved(models / shape, tmp_path, placement=on_gpus),
        train=[],
        held_out=[],
        rewards=(),
        first_step=1,
    )
    assert memory_of_run(plan).splitlines() == list(table(found.table()))


def test_a_dry_run_prints_no_memory_of_gpus_on_a_cpu_or_of_unknown_size(
    machine: Machine, models: Path, tmp_path: Path
) -> None:
    config, _ = plan_config(None, from_command_line(()), 2048)
    machine.lists(H100.replace("81920", "[N/A]"))
    for device in ("cpu", "cuda"):
        at = resolved(models / "0.5B", tmp_path, placement={"device": device})
        plan = RunPlan(
            run=RunDir(tmp_path), config=config, resolved=at, train=[], held_out=[], rewards=(), first_step=1
        )
        assert memory_of_run(plan) == ""


@pytest.mark.parametrize("family", ["llama", "qwen3_moe", "qwen2_5_vl"])
def test_config_json_alone_gives_the_sizes_of_the_model(tmp_path: Path, family: str) -> None:
    """Tied embeddings, experts, and a tower that reads images."""
    import torch

    from skylite.hub.text_model import auto_class

    config = tiny_config(family)
    torch.manual_seed(0)
    model = auto_class(config).from_config(config)
    model.save_pretrained(tmp_path / "model")
    lora = TrainConfig().lora
    whole = model_sizes(tmp_path / "model", lora)
    alone = tmp_path / "alone.json"
    alone.write_text((tmp_path / "model" / "config.json").read_text())
    with model_or_outline(str(alone)) as outline:
        assert outline.name == "alone"
        found = model_sizes(outline, lora)
        place_of_it = outline
    assert not place_of_it.exists()
    for name in ("parameters", "lora", "kept", "recomputed", "largest_layer", "outside_layers", "cached",
                 "experts_per_token", "expert_intermediate", "num_layers", "vocabulary"):  # fmt: skip
        assert getattr(found, name) == getattr(whole, name), name


def test_a_base_in_4_bits_has_half_a_byte_for_each_element(tmp_path: Path, models: Path) -> None:
    assert write_quantised(models / "7B", tmp_path / "awq")
    sizes = model_sizes(tmp_path / "awq", TrainConfig().lora)
    layers = 28 * (2 * 3584**2 + 2 * 512 * 3584 + 3 * 18944 * 3584)
    assert sizes.quantised == layers
    groups = layers // 128
    assert sizes.quantised_bytes == layers // 2 + 2 * groups + groups // 2, "numbers, scales, zero points"
    assert not write_quantised(tmp_path / "awq", tmp_path / "again")


def test_what_is_set_stays(models: Path) -> None:
    found = fit(models / "7B", "8x80", "trainer.num_ranks=6", "engine.tensor_parallel=2")
    assert "trainer.num_ranks" not in found.settings
    assert found.placement.rank_gpus == [0, 1, 2, 3, 4, 5]
    assert found.config.engine.tensor_parallel == 2
    config, _ = plan_config(None, from_command_line(["algorithm.name=sft"]), None)
    assert list(attempts(config, 4, is_quantised=True)) == [{"trainer.num_ranks": 4}], "no engines"


def plan(model: Path, *args: str) -> Reply:
    return call(["plan", "--model", str(model), *args])


def command_of(reply: Reply) -> list[str]:
    """The arguments of `skylite train` in the last line of a plan."""
    words = shlex.split(reply.out.strip().splitlines()[-1])
    assert words[:2] == ["skylite", "train"]
    return words[2:]


def test_a_plan_is_one_screen_and_its_command_plans_the_same(models: Path) -> None:
    reply = plan(models / "7B", "--gpus", "8x80", "--tokens", "2048", "--rank", "16")
    assert reply.code == 0
    lines = reply.out.splitlines()
    assert len(lines) <= 24
    assert lines[0] == "7B: 7.6 billion parameters, LoRA rank 16, sequences of 2,048 tokens"
    assert lines[1].startswith("8 GPUs of 80 GiB: fits, split: rank 0 to 3 on GPU 0, 1, 2, 3; engine 0 to 3")
    assert lines[3].split() == ["GiB", "GPU", "0-3", "GPU", "4-7"]
    assert any(line.startswith("Placement shared fits, too (trainer.num_ranks=8") for line in lines)
    assert "--rank 16 --set rollout.max_completion_tokens=1024 --set trainer.num_ranks=4" in lines[-1]
    again = call(["plan", "--gpus", "8x80", *command_of(reply)])
    assert again.out.splitlines()[:14] == lines[:14]


@pytest.mark.parametrize(
    ("shape", "gpus", "settings", "change"),
    [
        ("72B", "2x80", (), "with the base in 4 bits (AWQ)"),
        ("72B", "80", (), "with the base in 4 bits (AWQ)"),
        ("72B", "48", (), "on 4x48"),
        ("7B", "8x80", ("engine.tensor_parallel=1", "engine.gpu_memory_utilization=0.15"),
         "without engine.tensor_parallel, engine.gpu_memory_utilization"),
        ("0.5B", "8", ("rollout.max_completion_tokens=30000",), "with sequences of 16,024 tokens"),
        ("0.5B", "4", (), "on 1x24"),
    ],
)  # fmt: skip
def test_what_does_not_fit_says_what_would(
    models: Path, shape: str, gpus: str, settings: tuple[str, ...], change: str
) -> None:
    typed = [word for setting in settings for word in ("--set", setting)]
    reply = plan(models / shape, "--gpus", gpus, *typed)
    assert reply.code == 1
    lines = reply.out.splitlines()
    assert "does not fit. The " in lines[1]
    assert lines[2].startswith(f"It fits {change}"), lines[2]
    words = command_of(reply)
    if "AWQ" in change:
        assert words[:2] == ["--set", f'model.name="{models / shape}-AWQ"']
        return
    where = change.partition("on ")[2] or gpus
    again = call(["plan", "--gpus", where, *words])
    assert again.code == 0, again.output


def test_what_no_machine_holds_says_so(models: Path) -> None:
    reply = plan(models / "0.5B", "--gpus", "16x1", "--set", "engine.policies=5000")
    assert reply.code == 1
    assert reply.out.endswith("Nothing that was tried makes it fit on one machine.\n")


def test_json_has_the_plan_for_programs(models: Path) -> None:
    reply = plan(models / "0.5B", "--gpus", "24", "--json")
    facts = json.loads(reply.out)
    assert (reply.code, facts["fits"], facts["reason"], facts["would_fit"]) == (0, True, "", "")
    assert facts["plan"]["placement"] == "shared"
    assert facts["other_placement"] is None
    assert sum(facts["plan"]["bytes"]["0"].values()) == 24 * GIB
    assert facts["plan"]["command"] == f"skylite train --model {models / '0.5B'}"


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        (["--gpus", "0x8x80"], "--gpus 0x8x80 does not begin with a number of machines"),
        (["--gpus", "8x"], "--gpus 8x does not describe 1 to 16 GPUs and the GiB of each."),
        (["--gpus", "17x80"], "--gpus 17x80 does not describe 1 to 16 GPUs"),
        (["--gpus", "8x80", "--set", "engine.tensor_parallel=4"], "num_attention_heads=14 must be"),
        (["--gpus", "2x80", "--set", "trainer.num_ranks=4"], "trainer.num_ranks=4 needs 4 GPUs"),
        (["--gpus", "80", "--tokens", "1024"], "--tokens 1024 leaves no completion"),
        (["--gpus", "80", "--tokens", "40000"], "0.5B was made for 32,768"),
        (["--gpus", "80", "--set", "engine.launcher=mine.py:Launcher"], "predicts vLLM's memory"),
    ],
)  # fmt: skip
def test_bad_input_is_one_sentence(models: Path, args: list[str], sentence: str) -> None:
    reply = plan(models / "0.5B", *args)
    assert reply.code == 2
    assert sentence in reply.output
    assert "Traceback" not in reply.output


def broken_configs() -> Iterator[tuple[Any, str]]:
    qwen = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}
    yield "{", "cannot be read as JSON"
    yield {"architectures": ["BertModel"]}, "is not a causal language model: its model.json names"
    yield {**qwen, "model_type": "invented"}, "is a model of type 'invented'"
    yield {**qwen, "num_hidden_layers": "many"}, "transformers makes no model from the config.json of model"
    yield {**qwen, "quantization_config": {"quant_method": "fp8"}}, "does not say which matrices are"


@pytest.mark.parametrize(("config", "sentence"), list(broken_configs()))
def test_a_broken_config_json_is_one_sentence(tmp_path: Path, config: Any, sentence: str) -> None:
    file = tmp_path / "model.json"
    file.write_text(config if isinstance(config, str) else json.dumps(config))
    reply = plan(file, "--gpus", "80")
    assert reply.code == 2
    assert sentence in reply.output
