"""Readers of files of a stranger's run: checkpoints, steps, loggers, evaluations, the report, the mark."""

from __future__ import annotations

import json
import random
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any, cast

import torch

from skylite.config.loading import read_run_config
from skylite.config.train import EvalConfig, OptimConfig
from skylite.errors import DataError
from skylite.loggers.follow import fingerprint, numbers, open_journal
from skylite.model.process_group import Dist
from skylite.report.html import page_data, page_html
from skylite.report.read_run import read_facts
from skylite.rollout.resume import recover_metrics
from skylite.rollout.session import read_events
from skylite.run.checkpoint_folder import MANIFEST, verify_checkpoint, write_checkpoint_manifest
from skylite.run.metrics_file import held_out_scores, read_metrics
from skylite.run.own_folders import MARK_NAME, require_own_folders
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import RunDir
from skylite.run.status import Status, write_status
from skylite.trainer.anomaly import consecutive_skips
from skylite.trainer.canary import longest_prompt, read_canary, read_canary_image
from skylite.trainer.checkpoint import load_checkpoint, save_checkpoint
from skylite.trainer.micro_batch_memory import recorded_tokens
from skylite.trainer.optimizer import FlatAdamW, make_optimizer
from tests.fuzz.reader import (
    Damage,
    Reader,
    copy,
    document,
    lines,
    one_of,
    prepare_nothing,
    read_all,
)
from tests.rows import groups_of, random_samples
from tests.small_run import settings
from tests.unit.run_cases import begin

METRICS: list[dict[str, Any]] = [
    {"step": n, "reward/mean": 0.5, "time/step_s": 1.0, "adapter/version": n} for n in range(1, 5)
]
EVENTS = [{"event": "sampling_started", "step": n, "monotonic": 1.0 + n, "wall": 2.0 + n} for n in range(4)]
JOURNAL = [
    {"run_id": "0123456789ab", "name": "run"},
    {"step": 1, "fingerprint": "f"},
    {"step": 2, "fingerprint": "g"},
    {"evaluated": 2},
]
EVALUATION = {"mean": 0.5, "is_binary": True, "version": 2, "split": "test", "limit": 4}
MACHINE = {"versions": {"torch": "2"}, "cpu": {"cores": 2, "name": "x"}}
STEP_FILES = {
    "micro_batch.json": {"tokens": 64, "reason": "fits", "setting": "auto"},
    "canary.json": {
        "sequences": [[1, 2, 3], [4, 5]],
        "longest_prompt_tokens": 9,
        "image": {"start": 1, "length": 1, "data": "iVBORw0="},
    },
    "trainer_steps/step-000001.json": {
        "metrics": {"loss": 0.5, "lr": 1e-4}, "trained": [1.0, 2.0], "skipped": "nan",
        "packing": "tree", "tokens_per_micro_batch": 64,
    },
}  # fmt: skip
EVALUATION_FILE = "evals/step-v000002.json"
CHECKPOINT_FILES = ("state.json", MANIFEST)
STEP = "checkpoints/step-000001"
ONE_RANK = Dist(0, 1, torch.device("cpu"), mesh=cast(Any, None))


def _optimizer() -> FlatAdamW:
    params = {name: torch.nn.Parameter(torch.ones(2, 2)) for name in ("lora_A", "lora_B")}
    return make_optimizer("policy", params, 1e-3, 1.0, OptimConfig())


def _prepare_checkpoint(folder: Path) -> None:
    (folder / "checkpoints").mkdir()
    save_checkpoint(RunDir(folder), 1, settings(), [_optimizer()])
    for name in CHECKPOINT_FILES:
        copy(folder, f"{STEP}/{name}", f"good-{name}")


def _checkpoint_file(name: str) -> Damage:
    """Damage to one file, under a manifest that fits: its author writes both."""
    change = document(name)

    def damage(folder: Path, chosen: random.Random, kind: str) -> None:
        for good in CHECKPOINT_FILES:
            copy(folder, f"good-{good}", f"{STEP}/{good}")
        change(folder, chosen, kind)
        (folder / name).replace(folder / STEP / name)
        if name != MANIFEST:
            (folder / STEP / MANIFEST).unlink()
            write_checkpoint_manifest(folder / STEP, 1)

    return damage


def _read_checkpoint(folder: Path) -> None:
    verify_checkpoint(folder / STEP)
    load_checkpoint(folder / STEP, [_optimizer()])


def _prepare_step_files(folder: Path) -> None:
    run = begin(folder)
    run.trainer_steps.mkdir(exist_ok=True)
    write_rollouts(run.rollout_path(1), groups_of(random_samples(1)))


def _step_files(folder: Path, chosen: random.Random, kind: str) -> None:
    for name, tree in STEP_FILES.items():
        (folder / "run" / name).write_text(json.dumps(tree))
    one_of(*(document(name, tree) for name, tree in STEP_FILES.items()))(folder / "run", chosen, kind)


def _read_step_files(folder: Path) -> None:
    """What a resume and a replay read."""
    run = RunDir(folder / "run")
    recover_metrics(run, 0, 1)
    read_all(
        lambda _: recorded_tokens(run, "auto"),
        lambda _: (read_canary(run), read_canary_image(run), longest_prompt(run)),
        lambda _: consecutive_skips(run, 2),
        lambda _: run.read_count(run.trainer_step_path(1), "tokens_per_micro_batch"),
    )(folder)


def _restored(trees: dict[str, list[Any]]) -> Damage:
    """Replace every file of JSON lines, then damage one of them."""

    def damage(folder: Path, chosen: random.Random, kind: str) -> None:
        for name, parts in trees.items():
            (folder / name).write_text("".join(json.dumps(part) + "\n" for part in parts))
        name = chosen.choice(list(trees))
        lines(name, trees[name])(folder, chosen, kind)

    return damage


def _read_for_logger(folder: Path) -> None:
    """What `skylite log` reads. The journal is a copy, because opening it makes a lock beside it."""
    for event in read_events(folder / "events.jsonl"):
        event.get("step")
    steps = read_metrics(folder / "metrics.jsonl")
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "name.jsonl"
        path.write_bytes((folder / "name.jsonl").read_bytes())
        journal = open_journal(path)
        assert journal is not None
        with closing(journal.lock):
            for step in steps:
                fingerprint(step)
                numbers(step)
            journal.start_over("again")


def _prepare_report(folder: Path) -> None:
    run = begin(folder)
    write_status(run.status_path, Status(phase="done", step=4, num_steps=4, adapter_version=4))
    write_rollouts(run.rollout_path(1), groups_of(random_samples(1)))
    run.evals.mkdir(exist_ok=True)
    _restore_report(folder)


def _restore_report(folder: Path) -> None:
    run = folder / "run"
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in METRICS))
    (run / EVALUATION_FILE).write_text(json.dumps(EVALUATION))
    (run / "machine.json").write_text(json.dumps(MACHINE))


def _report(folder: Path, chosen: random.Random, kind: str) -> None:
    _restore_report(folder)
    one_of(
        document(EVALUATION_FILE, EVALUATION),
        document("machine.json", MACHINE),
        lines("metrics.jsonl", METRICS),
    )(folder / "run", chosen, kind)


def _read_for_report(folder: Path) -> None:
    """The page and the held-out scores. What the page names as unreadable counts as refused."""
    facts = read_facts(folder / "run")
    page = page_data([facts], 10, lambda: None)
    page_html(page)
    held_out_scores(RunDir(folder / "run"), EvalConfig(split="test", limit=4))
    if unreadable := page["runs"][0]["unreadable"]:
        raise DataError("; ".join(unreadable))


def _prepare_mark(folder: Path) -> None:
    run = begin(folder, lora_sync_path=str(folder / "adapters"))
    run_id = read_run_config(run.config_path).resolved.identity.run_id
    (folder / "adapters" / f"good-{MARK_NAME}").write_text(json.dumps({"run_id": run_id}))


def _mark(folder: Path, chosen: random.Random, kind: str) -> None:
    document(MARK_NAME)(folder / "adapters", chosen, kind)


def _read_mark(folder: Path) -> None:
    run = RunDir(folder / "run")
    require_own_folders(run, read_run_config(run.config_path))


RUN_READERS = {
    "checkpoint": Reader(
        _prepare_checkpoint,
        one_of(*map(_checkpoint_file, CHECKPOINT_FILES)),
        _read_checkpoint,
    ),
    "step files": Reader(_prepare_step_files, _step_files, _read_step_files, share=0.5),
    "logger files": Reader(
        prepare_nothing,
        _restored({"name.jsonl": JOURNAL, "metrics.jsonl": METRICS, "events.jsonl": EVENTS}),
        _read_for_logger,
    ),
    "report": Reader(_prepare_report, _report, _read_for_report, share=0.5),
    "folder mark": Reader(_prepare_mark, _mark, _read_mark, share=0.5),
}
