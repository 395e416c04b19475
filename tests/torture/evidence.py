"""What a run left on disk: finished steps, their digests, and damaged or temporary files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from skylite.adapters.manifest import read_manifest
from skylite.errors import SkyliteError
from skylite.rollout.session import read_events
from skylite.run.checkpoint_folder import verify_checkpoint
from skylite.run.files import TEMPORARY_MARK
from skylite.run.metrics_file import read_metrics
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir, published_versions
from skylite.run.status import read_status


def digests(run: RunDir) -> dict[int, str]:
    """sha256 of the weights by adapter version."""
    return {a.version: _digest(a.weights_path) for a in published_versions(run.default_adapters)}


def finished_steps(run: RunDir) -> dict[int, str]:
    """Steps in metrics.jsonl, with the sha256 of their rollouts."""
    steps = [line["step"] for line in read_metrics(run.metrics_path)] if run.metrics_path.exists() else []
    return {step: _digest(run.rollout_path(step)) for step in steps}


def last_finished(run: RunDir) -> int:
    """The last step in metrics.jsonl, 0 if there is none."""
    lines = read_metrics(run.metrics_path) if run.metrics_path.exists() else []
    return max((line["step"] for line in lines), default=0)


def is_done(run: RunDir) -> bool:
    """Whether the run recorded that it is done."""
    return run.status_path.exists() and read_status(run.status_path).phase == "done"


def newest_checkpoint(run: RunDir) -> int:
    """The step of the newest checkpoint, 0 if there is none."""
    return max((int(p.name.removeprefix("step-")) for p in _final(run.checkpoints, "step-*")), default=0)


def newest_trace(run: RunDir) -> int:
    """The last step of which any file exists."""
    names = [p.stem for folder in (run.rollouts, run.default_adapters) for p in _final(folder, "*-*")]
    numbers = [int(digits) for name in names if (digits := name.rpartition("-")[2].lstrip("v")).isdigit()]
    return max([last_finished(run), *numbers])


def torn(run: RunDir) -> list[str]:
    """Files under their final name that are incomplete or damaged."""
    paths_by_reader: list[tuple[Callable[[Path], object], list[Path]]] = [
        (read_manifest, [a.path for a in published_versions(run.default_adapters)]),
        (read_rollouts, _final(run.rollouts, "*.parquet")),
        (run.read_json, [*_final(run.trainer_steps, "*.json"), *_final(run.root, "c*.json")]),
        (verify_checkpoint, _final(run.checkpoints, "step-*")),
        (read_metrics, _final(run.root, "metrics.jsonl")),
        (read_events, _final(run.root, "events.jsonl")),
        (read_status, _final(run.root, "status.json")),
    ]
    found = []
    for read, path in ((read, path) for read, paths in paths_by_reader for path in paths):
        try:
            read(path)
        except (SkyliteError, OSError, ValueError) as error:
            found.append(f"{path.name}: {error}")
    return found


def leftovers(run: RunDir) -> list[str]:
    """Temporary files and folders, which a resume must remove."""
    return [f"left over: {p.relative_to(run.root)}" for p in run.root.rglob("*") if TEMPORARY_MARK in p.name]


def verified_after(run: RunDir, wall: float) -> float | None:
    """Seconds from a start at `wall` (time.time()) until it had verified its adapter, None if never."""
    events = read_events(run.events_path) if run.events_path.exists() else []
    later = [line for line in events if line["wall"] >= wall]
    starts = [line["wall"] for line in later if line["event"] == "run_started"]
    end = starts[1] if len(starts) > 1 else float("inf")
    verified = (line["wall"] for line in later if line["event"] == "adapter_verified" and line["wall"] < end)
    return next((round(at - wall, 2) for at in verified), None)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "missing"


def _final(folder: Path, pattern: str) -> list[Path]:
    return [p for p in sorted(folder.glob(pattern)) if TEMPORARY_MARK not in p.name]
