"""vLLM's command line and environment: the settings that would fail silently."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skylite.config.train import TrainConfig
from skylite.engine.connections import Address
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.plugin.api_key import RequireKey
from skylite.errors import ModelError
from skylite.processes.torchrun import trainer_env
from skylite.run.run_dir import AdapterVersion
from tests.small_run import settings
from tests.unit.engine_cases import PUBLIC, SPEC

LAUNCHER = VllmLauncher()


def test_a_cache_of_half_a_gib_is_not_rounded() -> None:
    """VLLM_CPU_KVCACHE_SPACE takes only integer GiB, so it must not be used."""
    command = LAUNCHER.command(SPEC)
    assert command[command.index("--kv-cache-memory-bytes") + 1] == str(2**29)
    assert "VLLM_CPU_KVCACHE_SPACE" not in LAUNCHER.environment(SPEC)


def test_gpu_server_gets_no_cpu_settings() -> None:
    spec = dataclasses.replace(SPEC, device="cuda", dtype="bfloat16", gpus=(2, 3))
    command, env = LAUNCHER.command(spec), LAUNCHER.environment(spec)
    assert "--block-size" not in command
    assert "--compilation-config" not in command
    assert command[command.index("--gpu-memory-utilization") + 1] == "0.4"
    assert env["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert not {"SKYLITE_CPU_LORA", "VLLM_CPU_OMP_THREADS_BIND", "LD_PRELOAD"} & set(env)


def test_flashinfers_sampler_is_used_only_if_the_user_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels need nvcc, and the engine of a run gets the user's variables from its parent."""
    spec, name = dataclasses.replace(SPEC, device="cuda", dtype="bfloat16"), "VLLM_USE_FLASHINFER_SAMPLER"
    monkeypatch.delenv(name, raising=False)
    assert LAUNCHER.environment(spec)[name] == "0"
    assert name not in LAUNCHER.environment(SPEC), "a CPU has none"
    monkeypatch.setenv(name, "1")
    assert LAUNCHER.environment(spec)[name] == "1"


def test_a_cpu_server_compiles_nothing() -> None:
    """With adapters vLLM does not; it then gets kernels by name. For a base model skylite forbids it."""
    command = LAUNCHER.command(SPEC)
    assert json.loads(command[command.index("--compilation-config") + 1]) == {
        "custom_ops": ["none", "+rms_norm", "+rotary_embedding"]
    }
    base = dataclasses.replace(SPEC, lora_rank=None)
    assert "--enforce-eager" in LAUNCHER.command(base)
    assert "--enforce-eager" not in LAUNCHER.command(dataclasses.replace(base, device="cuda"))


def test_no_server_loads_code_of_the_model() -> None:
    for command in (LAUNCHER.command(SPEC), LAUNCHER.command(PUBLIC)):
        assert "--no-trust-remote-code" in command
        assert "--trust-remote-code" not in command


def test_a_module_name_from_an_adapter_cannot_become_a_server_flag() -> None:
    for spec in (SPEC, PUBLIC):
        with pytest.raises(ModelError, match="--middleware"):
            LAUNCHER.command(
                dataclasses.replace(spec, target_modules=["q_proj", "--middleware=their.module"])
            )


def test_a_server_without_lora_cannot_load_adapters() -> None:
    spec = dataclasses.replace(SPEC, lora_rank=None)
    assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in LAUNCHER.environment(spec)
    assert not [flag for flag in LAUNCHER.command(spec) if "lora" in flag]


def test_engines_return_sampling_logprobs_and_skylite_serve_keeps_vllms_default() -> None:
    command = LAUNCHER.command(SPEC)
    assert command[command.index("--logprobs-mode") + 1] == "processed_logprobs"
    assert command[command.index("--uds") + 1] == "run/engine.sock"
    served = LAUNCHER.command(PUBLIC)
    assert not {"--logprobs-mode", "--uds"} & set(served)
    assert served[served.index("--host") + 1] == "127.0.0.1"


def test_auto_does_not_merge_weights_in_deterministic_runs(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"0" * 64)
    (tmp_path / "config.json").write_text("{}")
    exact, merged = {"deterministic": True}, {"cpu_lora": "merged"}
    assert LAUNCHER.choose_cpu_lora(TrainConfig(), "float32", tmp_path) == "merged"
    assert LAUNCHER.choose_cpu_lora(settings(trainer=exact), "float32", tmp_path) == "dense"
    assert LAUNCHER.choose_cpu_lora(settings(trainer=exact, engine=merged), "float32", tmp_path) == "merged"
    notes = LAUNCHER.notes(settings(trainer=exact), "cpu", "float32", "dense")
    assert any("trainer.deterministic" in note for note in notes)


def test_the_user_decides_how_the_trainers_threads_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT"):
        monkeypatch.delenv(name, raising=False)
    assert int(trainer_env(2)["GOMP_SPINCOUNT"]) > 0
    for name, value in (("OMP_WAIT_POLICY", "passive"), ("GOMP_SPINCOUNT", "7")):
        with monkeypatch.context() as users:
            users.setenv(name, value)
            assert "GOMP_SPINCOUNT" not in trainer_env(2), "it would hide the user's choice"


def test_threads_are_bound_to_the_cores_of_this_process() -> None:
    allowed = os.sched_getaffinity(0)
    one = {min(allowed)}
    os.sched_setaffinity(0, one)
    try:
        assert LAUNCHER.environment(SPEC)["VLLM_CPU_OMP_THREADS_BIND"] == str(min(allowed))
    finally:
        os.sched_setaffinity(0, allowed)
    first = dataclasses.replace(SPEC, cpu_cores=1)
    assert LAUNCHER.environment(first)["VLLM_CPU_OMP_THREADS_BIND"] == str(min(allowed))


def test_experts_are_served_in_the_form_that_peft_writes() -> None:
    argv = LAUNCHER.command(dataclasses.replace(SPEC, target_modules=["q_proj", "experts"]))
    assert argv[argv.index("--lora-target-modules") :][:3] == ["--lora-target-modules", "experts", "q_proj"]
    assert "--enable-mixed-moe-lora-format" in argv
    assert "--enable-mixed-moe-lora-format" not in LAUNCHER.command(SPEC)


@pytest.mark.parametrize("path", ["/runs/a,b/policy-v000001", "/runs/a=b/x", "/runs/a b"])
def test_any_path_of_an_adapter_can_be_served(path: str) -> None:
    """vLLM takes a value with a comma for JSON."""
    argv = LAUNCHER.command(dataclasses.replace(PUBLIC, fixed_adapter=AdapterVersion(1, Path(path))))
    value = argv[argv.index("--lora-modules") + 1]
    assert json.loads(value) == {"name": "policy-v000001", "path": path, "is_3d_lora_weight": True}
    assert "," in value, "vLLM reads JSON only if it finds a comma"


def test_openmp_is_preloaded_before_the_users_libraries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "/lib/own.so")
    assert "LD_PRELOAD" not in LAUNCHER.environment(SPEC), "the user's stays"
    notes = LAUNCHER.notes(TrainConfig(), "cpu", "float32", "merged")
    assert any("intel-openmp" in note for note in notes)
    library = tmp_path / "lib" / "libiomp5.so"
    library.touch()
    assert LAUNCHER.environment(SPEC)["LD_PRELOAD"] == f"{library}:/lib/own.so"
    monkeypatch.setenv("LD_PRELOAD", "")
    assert LAUNCHER.environment(SPEC)["LD_PRELOAD"] == str(library)
    monkeypatch.setenv("LD_PRELOAD", "/lib/libgomp.so.1")
    assert "LD_PRELOAD" not in LAUNCHER.environment(SPEC)


@pytest.mark.parametrize(("dtype", "capacity"), [("bfloat16", "256"), ("float32", None)])
def test_vllm_keeps_few_compiled_products_in_bfloat16(dtype: Any, capacity: str | None) -> None:
    env = LAUNCHER.environment(dataclasses.replace(SPEC, dtype=dtype))
    assert env.get("ONEDNN_PRIMITIVE_CACHE_CAPACITY") == capacity


def test_the_trainer_preloads_an_allocator_that_reuses_what_it_frees(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("LD_PRELOAD", "/lib/own.so")
    assert "LD_PRELOAD" not in trainer_env(2)
    (tmp_path / "lib").mkdir()
    libraries = [tmp_path / "lib" / name for name in ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")]
    for library in libraries:
        assert "LD_PRELOAD" not in trainer_env(2)
        library.touch()
    assert trainer_env(2)["LD_PRELOAD"] == f"{libraries[0]}:{libraries[1]}:/lib/own.so"
    monkeypatch.setenv("LD_PRELOAD", "/lib/libjemalloc.so.2")
    assert "LD_PRELOAD" not in trainer_env(2)


def test_the_trainer_does_not_prefer_cudnn_attention() -> None:
    """torch reads the variable once, at the first attention call."""
    assert trainer_env(2)["TORCH_CUDNN_SDPA_DEPRIORITIZED"] == "1"


def printed_by_a_trainer(image: dict[str, str], code: str) -> str:
    """What `code` prints with the trainer's environment, on an image that sets these variables."""
    env = {**os.environ, **image, **trainer_env(1)}
    child = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    return child.stdout.strip()


def test_the_trainers_segments_can_grow_whatever_the_image_sets() -> None:
    image = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64", "PYTORCH_ALLOC_CONF": "max_split_size_mb:32"}
    code = "import torch; print(torch._C._accelerator_getAllocatorSettings())"
    assert printed_by_a_trainer(image, code) == "expandable_segments:True"


def test_the_trainers_float32_is_not_tf32_on_an_image_that_allows_it() -> None:
    image = {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1", "NVIDIA_TF32_OVERRIDE": "1"}
    code = "import torch; print(torch.get_float32_matmul_precision())"
    assert printed_by_a_trainer(image, code) == "highest"
    assert trainer_env(1)["NVIDIA_TF32_OVERRIDE"] == "0"


def test_a_child_really_uses_the_allocator_installed_by_pip() -> None:
    code = "print('libtbbmalloc_proxy' in open('/proc/self/maps').read())"
    child = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **trainer_env(1)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert (child.stdout.strip(), child.stderr) == ("True", "")


def test_the_api_key_of_skylite_serve_is_in_no_process_list() -> None:
    env = LAUNCHER.environment(PUBLIC)
    assert env["SKYLITE_API_KEY"] == "secret"
    assert (env["VLLM_ALLOW_RUNTIME_LORA_UPDATING"], env["VLLM_SERVER_DEV_MODE"]) == ("0", "0")
    served = LAUNCHER.command(PUBLIC)
    assert "secret" not in " ".join(served)
    assert "secret" not in repr(PUBLIC)
    assert served[served.index("--middleware") + 1] == "skylite.engine.vllm.plugin.api_key.RequireKey"


def test_a_new_key_does_not_compile_the_model_again() -> None:
    """vLLM 0.26 hashes the values of its own variables into the name of its compiled code."""
    addresses = [Address("http://127.0.0.1:8000", key) for key in ("one", "two")]
    first, second = (LAUNCHER.environment(dataclasses.replace(PUBLIC, address=a)) for a in addresses)
    assert {name for name in first if first[name] != second[name]} == {"SKYLITE_API_KEY"}
    assert LAUNCHER.environment(SPEC)["VLLM_API_KEY"] == first["VLLM_API_KEY"] == "", "as in runs"


def test_engines_and_ranks_ignore_the_network_interface_of_the_cluster() -> None:
    cluster = {"GLOO_SOCKET_IFNAME": "eth0", "NCCL_SOCKET_IFNAME": "ib0", "VLLM_HOST_IP": "192.0.2.1"}
    engine, trainer = cluster | LAUNCHER.environment(SPEC), {**cluster, **trainer_env(1)}
    assert (engine["GLOO_SOCKET_IFNAME"], engine["NCCL_SOCKET_IFNAME"], engine["VLLM_HOST_IP"]) == (
        "lo",
        "lo",
        "127.0.0.1",
    )
    assert (trainer["GLOO_SOCKET_IFNAME"], trainer["NCCL_SOCKET_IFNAME"]) == ("lo", "lo")


@pytest.mark.parametrize(
    ("path", "header", "status"),
    [
        ("/invocations", None, 401),
        ("/metrics", "Bearer wrong", 401),
        ("/v1/models", "Basic right", 401),
        ("/v1/models", "bearer right", 200),
        ("/tokenize", "Bearer right", 200),
        ("/health", None, 200),
    ],
)
def test_every_route_except_health_requires_the_key(
    path: str, header: str | None, status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200})

    async def ask() -> int:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            return {}

        headers = [(b"authorization", header.encode())] if header else []
        await RequireKey(app)({"type": "http", "path": path, "headers": headers}, receive, send)
        return int(sent[0]["status"])

    monkeypatch.setenv("SKYLITE_API_KEY", "right")
    assert asyncio.run(ask()) == status
