"""List, verify or clean up the published adapters of a run."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from skylite.adapters.manifest import read_manifest
from skylite.adapters.retention import clean_up, remove_unfinished_files
from skylite.cli.help import Commands
from skylite.cli.options import AsJson, RunFolder
from skylite.config.loading import read_run_config
from skylite.engine.canary_reading import TOO_SMALL, verdict_of
from skylite.errors import ModelError
from skylite.progress_reporting import long_work
from skylite.run.files import TEMPORARY_MARK
from skylite.run.metrics_file import read_metrics
from skylite.run.own_folders import lock_run, require_own_folders
from skylite.run.run_dir import AdapterVersion, RunDir, published_versions
from skylite.ui.logs import show

adapters = Commands()


@adapters.command()
def verify(target: RunFolder, as_json: AsJson = False) -> None:
    """Check every published adapter against its hashes. Exits 1 if one is damaged.

    Also says which versions the canary of the run could not tell from the base or from the version before.
    """
    run, versions = _published(target)
    damage, verdicts = dict[int, str](), _verdicts(run)
    with long_work("verifying", total=len(versions)) as work:
        for published in versions:
            damage[published.version] = damage_of(published)
            work.advance()
    damaged = [text for text in damage.values() if text]
    if as_json:
        show(
            json.dumps(
                [
                    {"version": v, "damage": text or None, "canary": verdicts.get(v)}
                    for v, text in damage.items()
                ]
            )
        )
    else:
        for text in damaged:
            show(f"damaged: {text}")
        show(f"{len(versions) - len(damaged)} of {len(versions)} published adapters are intact")
        small = [str(v) for v in damage if verdicts.get(v) == TOO_SMALL]
        if small:
            show(
                f"too small to tell: {', '.join(small)} (in the run, the engines' answers with these "
                "versions differed too little from those with the base or the version before)"
            )
    if damaged:
        sys.exit(1)


def damage_of(adapter: AdapterVersion) -> str:
    """What is wrong with a published adapter; empty if nothing is."""
    try:
        manifest = read_manifest(adapter.path)
    except ModelError as error:
        return error.what
    return (
        ""
        if manifest.version == adapter.version
        else f"The manifest in {adapter.path} names version {manifest.version}."
    )


@adapters.command("list")
def list_versions(target: RunFolder, as_json: AsJson = False) -> None:
    """List the published adapters: step, bytes, age, canary gap."""
    run, versions = _published(target)
    gaps = {m["step"]: m.get("canary/gap_max") for m in read_metrics(run.metrics_path)}
    verdicts = _verdicts(run)
    if as_json:
        facts = [version_facts(a, gaps.get(a.version), verdicts.get(a.version)) for a in versions]
        show(json.dumps(facts))
        return
    show(f"{'version':<16}{'step':>8}{'bytes':>14}{'age':>12}  canary gap")
    for adapter in versions:
        show(version_line(adapter, gaps.get(adapter.version), verdicts.get(adapter.version)))


def _verdicts(run: RunDir) -> dict[int, str]:
    """Version -> what the canary of the run showed, for those that it checked."""
    return {
        m["step"]: verdict_of(m["canary/verified"])
        for m in read_metrics(run.metrics_path)
        if isinstance(m.get("canary/verified"), int | float)
    }


def version_facts(adapter: AdapterVersion, gap: float | None, verdict: str | None) -> dict[str, object]:
    """The facts of a version; "damaged" means that files are missing, since only `verify` hashes them."""
    facts: dict[str, object] = {"version": adapter.version, "name": adapter.name, "path": str(adapter.path)}
    try:
        manifest = read_manifest(adapter.path, verify_hash=False)
        published = adapter.manifest_path.stat().st_mtime
    except (ModelError, OSError):
        return {**facts, "damaged": True}
    return {
        **facts,
        "damaged": False,
        "step": manifest.step,
        "weights_bytes": manifest.weights_bytes,
        "published_at": datetime.fromtimestamp(published, UTC).isoformat(timespec="seconds"),
        "canary_gap": gap,
        "canary": verdict,
    }


def version_line(adapter: AdapterVersion, gap: float | None, verdict: str | None) -> str:
    """The line of a version. It shows missing files as damage, but only `verify` checks the hashes."""
    try:
        manifest = read_manifest(adapter.path, verify_hash=False)
        age_s = time.time() - adapter.manifest_path.stat().st_mtime
    except (ModelError, OSError):
        return f"{adapter.name:<16}  damaged: run `skylite adapters verify`"
    canary = "-" if gap is None else f"{gap:.1e}"
    canary += "" if verdict is None else f" {verdict}"
    return f"{adapter.name:<16}{manifest.step:>8}{manifest.weights_bytes:>14}{_age(age_s):>12}  {canary}"


@adapters.command()
def gc(target: RunFolder, as_json: AsJson = False) -> None:
    """Delete old adapters and checkpoints. Removes what the keep rules do not need, and unfinished files.

    Refused while the run is live.
    """
    run, versions = _published(target)
    recorded = read_run_config(run.config_path)
    config, folder = recorded.config, run.adapters(recorded)
    require_own_folders(run, recorded)
    with lock_run(run.root, folder, config.lora):
        leftovers = remove_unfinished_files(run, folder)
        newest = max((v.version for v in versions), default=0)
        removed = clean_up(run, folder, newest, config)
    if as_json:
        show(json.dumps({**asdict(removed), "unfinished": [str(path) for path in leftovers]}))
        return
    for path in leftovers:
        show(f"removed {path} (unfinished: {TEMPORARY_MARK})")
    for step in removed.checkpoints:
        show(f"removed checkpoint step-{step:06d} (checkpoint.keep_last={config.checkpoint.keep_last}, "
              f"keep_best={config.checkpoint.keep_best})")  # fmt: skip
    for version in removed.adapters:
        show(f"removed adapter v{version} (sync.keep_last={config.sync.keep_last}, "
              f"keep_every={config.sync.keep_every})")  # fmt: skip
    show(f"freed {removed.num_bytes} bytes: {len(removed.adapters)} adapters, "
          f"{len(removed.checkpoints)} checkpoints")  # fmt: skip


def _published(target: Path) -> tuple[RunDir, list[AdapterVersion]]:
    """The run and its published adapters, oldest first. Raises ConfigError if `target` is not a run."""
    run = RunDir(target.resolve())
    return run, published_versions(run.adapters(read_run_config(run.config_path)))


def _age(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"
