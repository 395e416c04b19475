"""A whole model as teacher: its files before a run, the memory and the process of the engine that it gets."""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skylite.cli.sweep import shared_plans
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.lora import LoraConfig
from skylite.config.resolved import TeacherModel
from skylite.config.train import RunConfig, TrainConfig
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.engine.model_sizes import model_sizes
from skylite.engine.start_engines import teacher_engine, teacher_spec
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.memory import engine_memory
from skylite.engine.vllm.models import check_lora
from skylite.environments.teacher_server import TeacherServer, teacher_running
from skylite.errors import ChildDied, ConfigError, DoesNotFit, ModelError, SkyliteError
from skylite.processes.child import Supervisor
from skylite.resources.gpu_fit import measured
from skylite.resources.gpu_memory_plan import Setup, plan_memory
from skylite.resources.gpu_placement import place
from skylite.rollout.plan import write_run
from skylite.rollout.resume import plan_resume
from skylite.rollout.run_session import Start, teacher_engine_of
from skylite.rollout.teacher_check import check_own_teacher, with_own_teacher
from skylite.types import Group
from tests.decisions import changed, resolved
from tests.e2e.project import FAKE_LAUNCHER
from tests.fakes.launcher import FakeLauncher
from tests.rows import groups_of, random_samples
from tests.settings import typed
from tests.small_run import settings
from tests.unit.gpu_cases import H200, RESOLVED, Machine
from tests.unit.test_dry_run import plan
from tests.unit.test_gpu_memory_plan import model

OPD = {"name": "opd"}
TOKENIZER = ChatTokenizer(run_jobs=lambda jobs: [], stop_token_ids=())
"""Its files were compared, so it is not asked."""


def other_model(source: Path, folder: Path, **config: Any) -> Path:
    """A copy with another config.json."""
    shutil.copytree(source, folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    return folder


# Which teachers are whole models


def test_a_folder_or_an_id_of_a_whole_model_is_told_from_an_adapter(tiny_llama: Path, tmp_path: Path) -> None:
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "config.json").write_text("{}")  # PEFT writes one beside some adapters
    (adapter / "adapter_config.json").write_text("{}")
    for name, is_model in (
        (str(tiny_llama), True),
        ("smollm2-135m", True),
        ("Qwen/Qwen2.5-1.5B-Instruct", True),
        (str(adapter), False),
        (str(tmp_path / "missing"), False),
        ("runs/a/adapters/policy-v000001", False),
    ):
        found = with_own_teacher(settings(algorithm=OPD | {"teacher": name})).algorithm
        assert found.own_teacher == (name if is_model else None)
        assert found.teacher_folder == (None if is_model else name)
        assert found.has_teacher_server == is_model
    for name in ("base", "ema", "http://h:1"):
        config = settings(algorithm=OPD | {"teacher": name, "reward_weight": 1.0})
        assert with_own_teacher(config) == config
    assert AlgorithmConfig(name="grpo").own_teacher is None


def test_what_no_server_can_fulfil_is_refused_for_a_whole_model_too(tiny_llama: Path) -> None:
    teacher = OPD | {"teacher": str(tiny_llama)}
    with pytest.raises(ConfigError, match=r"temperature=0\.8 changes the policy's probabilities"):
        with_own_teacher(settings(algorithm=teacher, rollout={"temperature": 0.8}))
    with pytest.raises(ConfigError, match=r"teacher_beta=0\.5 .*; set algorithm\.teacher_top_k=20"):
        with_own_teacher(settings(algorithm=teacher | {"name": "gkd"}))
    top = {"name": "gkd", "teacher_top_k": 50}
    assert with_own_teacher(settings(algorithm=teacher | top)).algorithm.own_teacher == str(tiny_llama)
    with pytest.raises(ConfigError, match=r"teacher_top_k=50 has no effect with .*=runs/a/b, an adapter"):
        with_own_teacher(settings(algorithm=top | {"teacher": "runs/a/b"}))


# Plans


def test_a_plan_names_the_teacher_and_a_resume_wants_the_same_files(tiny_llama: Path, tmp_path: Path) -> None:
    folder = other_model(tiny_llama, tmp_path / "big", note="another model")
    planned = plan(tmp_path, tiny_llama, algorithm=OPD | {"teacher": str(folder)})
    teacher = planned.resolved.teacher
    assert planned.config.algorithm.teacher == f"model:{folder}"
    assert teacher is not None
    assert (teacher.path, teacher.dtype) == (folder, "float32")
    assert teacher.max_tokens == planned.config.max_sequence_tokens + 1
    assert teacher.fingerprint != planned.resolved.model.fingerprint
    assert planned.resolved.identity.teacher is None
    notes = [note.text for note in planned.resolved.notes]
    assert any(
        note.startswith(f"the teacher is {folder}, in float32 on an engine of its own") for note in notes
    )
    assert any(", a teacher of " in note and note.startswith("memory: ") for note in notes)
    with pytest.raises(ConfigError, match=r"x has the teacher .* share all engines") as error:
        shared_plans({"x": planned})
    assert error.value.exit_code == 2

    write_run(planned)
    assert plan_resume(planned.run).resolved.teacher == teacher
    again = typed({"algorithm.teacher": str(folder)})
    assert plan_resume(planned.run, again).config.algorithm.teacher == f"model:{folder}"
    with pytest.raises(ConfigError, match=r"this would change its result: algorithm\.teacher is model:"):
        plan_resume(planned.run, typed({"algorithm.teacher": str(tiny_llama)}))
    (folder / "config.json").write_text((tiny_llama / "config.json").read_text())
    with pytest.raises(ConfigError, match="is not the one that taught the run"):
        plan_resume(planned.run)


def test_models_that_cannot_teach_are_refused_before_anything_starts(
    tiny_llama: Path, tmp_path: Path
) -> None:
    def refused(name: str, **config: Any) -> SkyliteError:
        folder = other_model(tiny_llama, tmp_path / name, **config)
        if name == "tokenizer":
            path = folder / "tokenizer.json"
            path.write_text(path.read_text().replace("<|im_start|>", "<|turn|>"))
        with pytest.raises(SkyliteError) as error:
            plan(tmp_path, tiny_llama, algorithm=OPD | {"teacher": str(folder)})
        assert error.value.exit_code == 2
        assert not (tmp_path / "run").exists()
        return error.value

    assert "has another tokenizer than" in refused("tokenizer").what
    assert "was made for 100 tokens, and this run may" in refused("short", max_position_embeddings=100).what
    assert "does not support it" in refused("class", architectures=["MadeUpForCausalLM"]).what
    assert "not a causal language model" in refused("bert", architectures=["BertModel"]).what


def test_a_teacher_needs_an_engine_of_the_run(tiny_llama: Path) -> None:
    urls = {"urls": ["http://127.0.0.1:9"]}
    config = with_own_teacher(settings(algorithm=OPD | {"teacher": str(tiny_llama)}, engine=urls))
    with pytest.raises(ConfigError, match=r"engine\.urls names engines that others start"):
        check_own_teacher(config, VllmLauncher(), TOKENIZER, [])


def test_a_teacher_needs_no_lora(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["GPT2LMHeadModel"]}')
    with pytest.raises(ModelError, match="serves it without LoRA only"):
        check_lora(tmp_path, "cuda")
    assert check_lora(tmp_path, "cuda", adapters=False) == ""
    assert VllmLauncher().check_model(tmp_path, "cuda", None) == ""


# Memory


def teacher_of(folder: Path, max_tokens: int = 201) -> TeacherModel:
    return TeacherModel(path=folder, fingerprint="f", dtype="bfloat16", max_tokens=max_tokens)


def small(**engine: Any) -> TrainConfig:
    rollout = {"max_prompt_tokens": 100, "max_completion_tokens": 100}
    return TrainConfig.model_validate({"rollout": rollout, "lora": {"rank": 4}, "engine": engine})


@pytest.mark.parametrize("gpus", [1, 2])
def test_on_gpus_the_teacher_is_beside_the_first_engine(machine: Machine, tmp_path: Path, gpus: int) -> None:
    """On two GPUs the trainer has one for itself."""
    folder, config = model(tmp_path / "m", 40), small()
    machine.lists(*[H200] * gpus)
    machine.has_torch()
    setup = Setup(VllmLauncher(), folder, "cuda", "bfloat16", "dense", place(config, "cuda"))
    alone, _ = plan_memory(config, setup)
    both, notes = plan_memory(config, replace(setup, own_teacher=teacher_of(folder)))
    engine = replace(
        engine_memory(
            model_sizes(folder, LoraConfig()),
            small(max_num_seqs=1024),
            "cuda", "bfloat16", max_loras=1, cpu_lora="dense",
        ),
        lora_slots=0,
    )  # fmt: skip
    kv_cache = (8192 // 201 * 4 + 1) * 64 * engine.kv_per_token  # 201 tokens: 4 blocks of 64
    assert both.teacher_kv_cache_bytes == kv_cache
    assert both.kv_cache_bytes == alone.kv_cache_bytes, "all of a step, with and without a teacher"
    assert alone.trainer_bytes is not None
    taken = engine.before_kv() + kv_cache if gpus == 1 else 0
    assert both.trainer_bytes == alone.trainer_bytes - taken
    assert any(n.text.startswith(f"memory of the teacher's engine on GPU {gpus - 1}: ") for n in notes)
    shown = measured(config, {}, replace(setup, own_teacher=teacher_of(folder))).table()
    assert {gpu: parts.get("teacher: vLLM") for gpu, parts in shown.items()} == {0: None} | {
        gpus - 1: engine.before_kv() + kv_cache
    }
    with pytest.raises(DoesNotFit, match="the teacher's engine takes "):
        plan_memory(
            small(gpu_memory_utilization=0.05),
            replace(setup, own_teacher=teacher_of(model(tmp_path / "b", 60))),
        )

    decisions = changed(RESOLVED, memory=both.model_dump()).model_copy(update={"teacher": teacher_of(folder)})
    algorithm = AlgorithmConfig(name="gkd", teacher="model:big", teacher_top_k=50)
    config = config.model_copy(update={"algorithm": algorithm})
    spec = teacher_spec(RunConfig(skylite_version="t", config=config, resolved=decisions), tmp_path)
    command = " ".join(VllmLauncher().command(spec))
    assert f"--model {folder} " in command
    assert f"--kv-cache-memory-bytes {kv_cache}" in command
    assert f"--gpu-memory-utilization {both.teacher_share}" in command
    assert "--max-model-len 201 " in command
    assert "--max-logprobs 50" in command
    assert "lora" not in command
    assert VllmLauncher().environment(spec)["CUDA_VISIBLE_DEVICES"] == "1", "that of the first engine"


def test_a_kv_cache_that_holds_no_sequence_of_the_teacher_is_refused(tmp_path: Path) -> None:
    folder, config = model(tmp_path / "m"), small(kv_cache_gib=0.0001)
    setup = Setup(VllmLauncher(), folder, "cpu", "float32", "dense", place(config, "cpu"))
    with pytest.raises(DoesNotFit, match=r"holds \d+ tokens of the teacher m, which may read 2,001 at once"):
        plan_memory(config, replace(setup, own_teacher=teacher_of(folder, 2001)))


# Its engine


def run_config(folder: Path, max_restarts: int) -> RunConfig:
    config = settings(
        algorithm=OPD | {"teacher": "model:big"},
        engine={"stall_timeout_s": 3.0, "max_restarts": max_restarts, "start_timeout_s": 120},
    )
    decisions = resolved(folder, folder).model_copy(update={"teacher": teacher_of(folder)})
    return RunConfig(skylite_version="t", config=config, resolved=decisions)


@pytest.mark.parametrize("order", ["die", "hang", "dead"])
def test_the_engine_restarts_as_others_do_and_the_request_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    monkeypatch.setenv("ENGINE_ORDERS", str(tmp_path))
    monkeypatch.setattr("skylite.environments.patient_client.BACKOFF_S", (0.2,))
    restarts: dict[str, int] = {}
    config = run_config(tmp_path, 1)

    async def run() -> list[list[float]]:
        async with (
            Supervisor() as supervisor,
            teacher_engine(FakeLauncher(), config, tmp_path, supervisor, restarts) as engine,
            teacher_running(config.config.algorithm, TOKENIZER, is_new=False, engine=engine) as teacher,
        ):
            assert isinstance(teacher, TeacherServer)
            before = (await teacher.score([3, 5, 7], 1)).logprobs
            (tmp_path / order).touch()
            after = (await asyncio.wait_for(teacher.score([3, 5, 7], 1), 240)).logprobs
            supervisor.check()
            return [before, after]

    assert asyncio.run(run()) == [[-1.25, -1.75]] * 2
    assert restarts == {"teacher": 1}
    assert (tmp_path / "teacher.log").exists()


def test_an_engine_that_may_not_restart_ends_the_run_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ENGINE_ORDERS", str(tmp_path))
    config = run_config(tmp_path, 0)

    async def run() -> None:
        async with (
            Supervisor() as supervisor,
            teacher_engine(FakeLauncher(), config, tmp_path, supervisor, {}) as engine,
            teacher_running(config.config.algorithm, TOKENIZER, is_new=True, engine=engine) as teacher,
        ):
            assert teacher is not None
            (tmp_path / "die").touch()
            asking = asyncio.ensure_future(teacher.score([3, 5], 1))
            try:
                await asyncio.wait_for(supervisor.watch(), 120)
            finally:
                asking.cancel()

    with pytest.raises(ChildDied, match=r"teacher ended with exit code 7\.") as error:
        asyncio.run(run())
    assert f"Its log is {tmp_path / 'teacher.log'}." in str(error.value)


def test_a_run_asks_the_engine_that_it_started(tiny_llama: Path, tmp_path: Path) -> None:
    planned = plan(
        tmp_path,
        tiny_llama,
        algorithm=OPD | {"teacher": str(other_model(tiny_llama, tmp_path / "big", note="another"))},
        engine={"launcher": FAKE_LAUNCHER},
    )
    restarts = SimpleNamespace(restarts=dict[str, int]())

    async def run() -> list[Group]:
        async with Supervisor() as supervisor, contextlib.AsyncExitStack() as stack:
            start = Start(plan=planned, resume=False, supervisor=supervisor, progress=restarts)  # type: ignore[arg-type]
            engine = await teacher_engine_of(start, stack)
            assert engine is not None
            assert engine.spec.model_path == tmp_path / "big"
            assert engine.spec.max_model_len == planned.config.max_sequence_tokens + 1
            teacher = await stack.enter_async_context(
                teacher_running(planned.config.algorithm, TOKENIZER, is_new=True, engine=engine)
            )
            assert teacher is not None
            return (await teacher.taught(groups_of(random_samples(0, num_groups=1))))[0]

    (group,) = asyncio.run(run())
    for call in (call for t in group.trajectories for call in t.calls):
        assert call.teacher_logprobs == [-token / 4 for token in call.completion_token_ids]
    assert (planned.run.logs / "teacher.log").exists()
