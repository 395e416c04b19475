"""`skylite export`: a trained adapter as a folder for other programs, checked, described, and pushed."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict

from skylite.errors import ConfigError
from skylite.export.plan import ExportFlags, plan_export
from skylite.export.push import check_push, push
from skylite.export.run import export as write_export
from skylite.processes.file_tree import tree_bytes
from skylite.run.remembered_durations import remembered_work
from skylite.ui.logs import show

logger = logging.getLogger(__name__)


def export(flags: ExportFlags, *, as_json: bool = False) -> None:
    """Write the folder, print what its checks measured, and push it if asked."""
    if flags.check_vllm and flags.gguf and not flags.merge:
        raise ConfigError("--check-vllm cannot check a GGUF file.", "Remove it, or add --merge.")
    token = check_push(flags.push) if flags.push is not None else ""
    plan = plan_export(flags)
    form = "merged weights" if plan.has_merged_weights else "the adapter"
    logger.info(f"exporting {form} of {plan.name} for {plan.base_name} to {plan.out}")
    checks = write_export(plan, check_vllm=flags.check_vllm)
    for check in checks:
        logger.info(str(check))
        if check.note:
            logger.warning(check.note)
    facts = {"name": plan.name, "folder": str(plan.out), "checks": [asdict(check) for check in checks]}
    if not as_json:
        show(f"exported {plan.name} to {plan.out}")
    if flags.push is not None:
        message = f"{plan.name} of a skylite run ({plan.out.name})"
        size = tree_bytes(plan.out)
        # The rate of small pushes says nothing about large ones: remember it by the digits of the size.
        key = f"push a byte of a size of {len(str(size))} digits"
        with remembered_work(f"pushing {size / 1e6:.0f} MB to {flags.push}", key, size):
            address = push(plan.out, flags.push, token, public=flags.public, message=message)
        facts["pushed_to"] = address
        if not as_json:
            show(f"pushed to {address}")
    if as_json:
        show(json.dumps(facts))
