"""Sharded base weights: each rank reads only its rows. Offloading does not change the gradient."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from transformers import AutoModelForCausalLM, MixtralConfig, MixtralForCausalLM

from skylite.model.loading import load_base, read_shard
from skylite.model.policy import is_lora_param, move_adapters
from skylite.model.process_group import Dist
from skylite.trainer.micro_batch_memory import peak_bytes, reset_peak_bytes
from tests.cases import gradients_after_step, policy_of, relative_difference
from tests.small_run import settings
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


def rank_of(size: int, rank: int, device_type: str) -> Dist:
    """One rank without the others, for code that does not communicate."""
    mesh = DeviceMesh(
        device_type, list(range(size)), mesh_dim_names=("fsdp",), _init_backend=False, _rank=rank
    )
    return Dist(rank, size, torch.device(device_type), mesh)


def sharded(rows: int, columns: int, dist: Dist) -> DTensor:
    """A parameter [rows, columns] on the meta device, sharded as FSDP2 does on this rank."""
    parts = torch.empty(rows, columns, device="meta").chunk(dist.dp_size)
    own = parts[dist.dp_rank] if dist.dp_rank < len(parts) else torch.empty(0, columns, device="meta")
    return DTensor.from_local(
        own, dist.mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, columns)), stride=(columns, 1)
    )


@pytest.mark.parametrize("rows", [16, 13])
def test_each_rank_reads_its_rows_and_keeps_them_off_the_gpu(rows: int, tmp_path: Path) -> None:
    complete, file = torch.randn(rows, 3), tmp_path / "model.safetensors"
    save_file({"weight": complete}, file)
    found = []
    for rank in range(8):
        dist = rank_of(8, rank, "cuda")
        shard = read_shard(file, "weight", sharded(rows, 3, dist), torch.float32, CPU, dist)
        assert (shard.device, shard.to_local().device, shard.shape) == (CPU, CPU, complete.shape)
        found.append(shard.to_local())
    assert torch.equal(torch.cat(found), complete)


def test_a_rank_reads_no_more_of_a_tensor_than_its_rows(tmp_path: Path) -> None:
    file, dist = tmp_path / "model.safetensors", rank_of(8, 5, "cpu")
    save_file({"weight": torch.ones(1 << 14, 1 << 10)}, file)  # 64 MiB, 8 of them this rank's
    param = sharded(1 << 14, 1 << 10, dist)
    before = reset_peak_bytes(CPU)
    shard = read_shard(file, "weight", param, torch.bfloat16, CPU, dist)
    taken = (peak_bytes(CPU) - before) / 2**20
    assert shard.to_local().sum() == 1 << 21
    assert taken < 24  # 8 MiB of file pages and 4 of bfloat16; a full read takes 64 or more


def test_adapters_go_to_the_compute_device_and_the_base_stays(tiny_llama: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(tiny_llama, dtype=torch.bfloat16)
    model = get_peft_model(
        base, LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "embed_tokens"])
    )
    model.add_adapter("ref", LoraConfig(task_type="CAUSAL_LM", r=3, target_modules=["up_proj"]))
    move_adapters(model, torch.device("meta"))
    for name, param in model.named_parameters():
        assert (param.device.type, param.dtype) == (
            ("meta", torch.float32) if is_lora_param(name) else ("cpu", torch.bfloat16)
        ), name


@pytest.mark.parametrize("family", ["llama", "gemma"])
def test_an_offloaded_base_has_the_same_gradient(family: str, tmp_path: Path, dist: Dist) -> None:
    model = make_tiny_model(tmp_path / family, family)
    offload = settings(trainer={"offload": True})
    policy = policy_of(model, offload, dist)
    assert all(isinstance(p, DTensor) != is_lora_param(n) for n, p in policy.model.named_parameters())
    got, _ = gradients_after_step(policy, offload, dist)
    expected, _ = gradients_after_step(policy_of(model, settings(), dist), settings(), dist)
    assert relative_difference(got, expected) < 1e-6


def test_checkpoints_with_other_tensor_names_are_loaded_fully_then_offloaded(
    tmp_path: Path, dist: Dist
) -> None:
    config = MixtralConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_local_experts=2,
    )
    plain = MixtralForCausalLM(config).eval()
    plain.save_pretrained(tmp_path)
    base, how = load_base(str(tmp_path), torch.float32, dist, offload=True)
    assert "rank 0 read the full model" in how
    assert {p.device for p in base.parameters()} | {b.device for b in base.buffers()} == {CPU}
    tokens = torch.arange(10)[None]
    base.set_attn_implementation("eager")
    with torch.no_grad():
        torch.testing.assert_close(base(tokens).logits, plain(tokens).logits)
