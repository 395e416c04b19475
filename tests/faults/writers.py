"""`python -m tests.faults.writers MODEL`: run a writer of skylite per line of stdin, each in a new fork.

In: {"writer": name, "folder": path}. Out: {"code": exit code of the command line, "message": text, "kind":
exception class}. A fault kills or fails only the fork, so torch is imported once.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from skylite.adapters.import_adapter import copy_adapter
from skylite.adapters.manifest import Canary
from skylite.adapters.retention import clean_up
from skylite.config.train import AnomalyConfig, EvalConfig, RunConfig
from skylite.errors import SkyliteError
from skylite.evaluation.confidence_interval import mean_score
from skylite.evaluation.evaluate import EvalResult, write_results
from skylite.hub.bundled_smollm2 import write_converted
from skylite.model.policy import Policy
from skylite.rollout.plan import RunPlan, write_run
from skylite.rollout.resume import remove_after
from skylite.rollout.shutdown import ask_trainer_to_end
from skylite.rollout.trusted_programs import remember
from skylite.run.files import append_line, write_json
from skylite.run.metrics_file import append_metrics, write_score
from skylite.run.own_folders import lock_folder
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import RunDir, adapter_name
from skylite.run.status import Status, write_status
from skylite.trainer.anomaly import save_rejected_step
from skylite.trainer.checkpoint import save_checkpoint
from skylite.trainer.optimizer import FlatAdamW
from skylite.trainer.publish_adapter import write_adapter
from skylite.trainer.worker import report_error
from skylite.types import Call, Group, Prompt, Trajectory
from tests.cases import optimizer_of, policy_of
from tests.decisions import resolved
from tests.engines import write_random_adapter
from tests.forks import in_a_fork
from tests.prepared import prepare
from tests.small_run import lone_rank, settings

CANARY = Canary(sequences=[[1, 2, 3]], policy_logprobs=[[-1.0, -2.0]], base_logprobs=[[-1.5, -2.5]])


def groups(version: int) -> list[Group]:
    """Enough text that a file takes several writes."""
    prompt = Prompt(
        id=f"p/{version}", messages=[{"role": "user", "content": "say x"}], answer="x", source="test"
    )
    ids = [(i * 7919 + version) % 256 for i in range(2000)]
    sample = Call(
        prompt_token_ids=[1, 2],
        completion_token_ids=ids,
        sampling_logprobs=[-i / 7 for i in range(2000)],
        adapter_version=version,
        text="x",
    )
    trajectories = tuple(Trajectory(calls=(sample,), reward=reward) for reward in (1.0, 0.0))
    return [Group(prompt=prompt, trajectories=trajectories)] * 4


def results(version: int) -> EvalResult:
    return EvalResult(
        model=f"m{version}",
        temperature=0.0,
        score=mean_score([[1.0, 0.0]]),
        completion_tokens_mean=1.0,
        truncated_frac=0.0,
        groups=groups(version),
    )


def rows(folder: Path, version: int) -> Path:
    path = folder / f"rows-{version}.jsonl"
    path.write_text(
        "".join(json.dumps({"q": f"{i} + {version}?", "a": f"#### {i + version}"}) + "\n" for i in range(9))
    )
    return path


def writers(policy: Policy, optimizer: FlatAdamW, model: Path) -> dict[str, Callable[[Path, int], Any]]:
    """By name: write `version` 1 or 2 of something into a folder, over or beside what is there."""

    def config(folder: Path) -> RunConfig:
        return RunConfig(skylite_version="test", config=settings(), resolved=resolved(model, folder))

    def plan(folder: Path) -> RunPlan:
        prompt = groups(0)[0].prompt
        return RunPlan(
            run=RunDir(folder / "run"),
            config=settings(),
            resolved=resolved(model, model.parent / "sync"),
            train=[prompt],
            held_out=[],
            rewards=("math",),
            first_step=1,
        )

    def status(folder: Path, v: int) -> None:
        write_status(
            folder / "status.json",
            Status(phase="sampling", step=v, num_steps=9, adapter_version=v, updated_at="then"),
        )

    def lock(folder: Path, v: int) -> None:
        with lock_folder(folder / f"locked-{v}"):
            pass

    return {
        "publish": lambda folder, v: write_adapter(policy, config(folder), v, CANARY),
        "checkpoint": lambda folder, v: checkpoint(RunDir(folder), v, optimizer),
        "rollouts": lambda folder, v: write_rollouts(RunDir(folder).rollout_path(v), groups(v)),
        "metrics": lambda folder, v: append_metrics(
            folder / "metrics.jsonl", {"step": v, "text": "x" * 9000}
        ),
        "status": status,
        "config": lambda folder, v: write_run(plan(folder / str(v))),
        "prepare": lambda folder, v: prepare(
            str(rows(model.parent, v)), out=folder / "data", question="q", answer="a", reward="gsm8k"
        ),
        "eval": lambda folder, v: write_results(folder / "greedy.parquet", results(v)),
        "warm start": lambda folder, v: copy_adapter(model.parent / "adapter", folder / str(v) / "copy"),
        "lock": lock,
        **small_writers(model),
    }


def small_writers(model: Path) -> dict[str, Callable[[Path, int], Any]]:
    """The same, of what needs no policy.

    Version 1 prepares the inputs of version 2, while nothing fails yet.
    """

    converted = AutoModelForCausalLM.from_pretrained(model), AutoTokenizer.from_pretrained(model)
    return {
        "bad inputs": bad_inputs,
        "canary": lambda folder, v: write_json(
            RunDir(folder).canary_path, {"sequences": [[v] * 2000] * 4, "longest_prompt_tokens": v}
        ),
        "clean-up": clean,
        "conversion": lambda folder, v: write_converted(*converted, folder / f"smollm2-{v}"),
        "events": lambda folder, v: append_line(
            RunDir(folder).events_path, json.dumps({"event": "x" * 9000, "step": v})
        ),
        "forget": forget,
        "micro-batch": lambda folder, v: write_json(
            RunDir(folder).micro_batch_path, {"tokens": v, "reason": "x" * 9000}
        ),
        "named reward": partial(named_reward, model),
        "score": lambda folder, v: write_score(RunDir(folder), "step", v, 0.5, EvalConfig(), is_binary=True),
        "stop": stop,
        "trainer error": trainer_error,
        "update": lambda folder, v: write_json(
            RunDir(folder).trainer_step_path(1), {"step": v, "text": "x" * 9000}
        ),
    }


def bad_inputs(folder: Path, v: int) -> None:
    run = RunDir(folder)
    for step in (1, 2) if v == 1 else ():
        write_rollouts(run.rollout_path(step), groups(step))
    save_rejected_step(run, v, "a reason", {"loss/policy": float("nan")}, AnomalyConfig())


def trainer_error(folder: Path, v: int) -> None:
    RunDir(folder).logs.mkdir(exist_ok=True)
    if v == 2:
        report_error(RunDir(folder), {"what": "x" * 9000, "hint": "", "final": True})


def named_reward(model: Path, folder: Path, v: int) -> None:
    os.environ["XDG_STATE_HOME"] = str(folder)
    remember(f"{model.parent}/reward-{v}.py:reward")


def forget(folder: Path, v: int) -> None:
    run = RunDir(folder)
    for step in (1, 2, 3) if v == 1 else ():
        append_metrics(run.metrics_path, {"step": step, "text": "x" * 9000})
    remove_after(run, folder / "adapters", 4 - v, reuse_rollouts=False)


def clean(folder: Path, v: int) -> None:
    for version in range(5) if v == 1 else ():
        write_json(folder / adapter_name(version) / "x.json", version)
    clean_up(RunDir(folder), folder, newest=2 + v, config=settings(sync={"keep_last": 3}))


def stop(folder: Path, v: int) -> None:
    if v == 2:
        ask_trainer_to_end(RunDir(folder))


def checkpoint(run: RunDir, step: int, optimizer: FlatAdamW) -> None:
    save_checkpoint(run, step, settings(), [optimizer])


def outcome(work: Callable[[], Any]) -> dict[str, Any]:
    sys.stdout = sys.stderr
    try:
        work()
    except SkyliteError as error:
        return {"code": error.exit_code, "message": str(error), "kind": type(error).__name__}
    except BaseException as error:  # noqa: BLE001 whatever else comes out is the test's finding
        return {"code": -1, "message": traceback.format_exc()[-3000:], "kind": type(error).__name__}
    return {"code": 0, "message": "", "kind": ""}


def main() -> None:
    model = Path(sys.argv[1])
    write_random_adapter(model.parent / "adapter", model)
    for v in (1, 2):
        (model.parent / f"reward-{v}.py").write_text("def reward(prompt, completion): return 1.0\n")
    torch.set_num_threads(1)
    with lone_rank() as dist:
        policy = policy_of(model, settings(), dist)
        optimizer = optimizer_of(policy, settings())
        optimizer.grads.fill_(0.5)
        optimizer.update(dist)
        table = writers(policy, optimizer, model)
        with contextlib.redirect_stdout(sys.stderr):
            table["prepare"](model.parent / "warm-up", 1)  # so that no fork imports them again
        gc.freeze()  # a collection in a fork would copy every page it looks at
        print(json.dumps(sorted(table)), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            work = partial(table[asked["writer"]], Path(asked["folder"]), asked["version"])
            print(in_a_fork(partial(outcome, work)), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
