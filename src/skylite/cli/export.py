"""Export an adapter as a PEFT folder, merged weights or GGUF.

Adds a model card. Loads the result again and compares its logprobs with the trainer's. Writes a complete
folder or nothing.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.options import WHICH, AsJson, RunOrNewest, Step, newest_run
from skylite.config.provenance import Provenance
from skylite.errors import ConfigError
from skylite.export.plan import ExportFlags, plan_export
from skylite.export.push import check_push
from skylite.export.push import push as upload
from skylite.export.run import export as write_export
from skylite.processes.file_tree import tree_bytes
from skylite.progress_reporting import long_work
from skylite.rollout.trusted_programs import allowed_launcher
from skylite.ui.logs import show

logger = logging.getLogger(__name__)


FORM, PUBLISH = "What to write", "Check and upload"
Best = Annotated[
    bool,
    typer.Option("--best", help="The kept version with the highest held-out score.", rich_help_panel=WHICH),
]
Merge = Annotated[
    bool,
    typer.Option(
        "--merge",
        help="Merged weights instead of a PEFT adapter. Merged in float32.",
        rich_help_panel=FORM,
    ),
]
MergeInto = Annotated[
    str | None,
    typer.Option(
        metavar="MODEL",
        help="For a quantised base: merge into the 16-bit model that it was made from, a hub id or a folder. "
        "Default: into the widened weights.",
        rich_help_panel=FORM,
    ),
]
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of merged weights: float32, bfloat16 or float16. Default: the base model's.",
        rich_help_panel=FORM,
    ),
]
Gguf = Annotated[
    bool,
    typer.Option(
        "--gguf",
        help="A GGUF file of the merged weights, by llama.cpp's converter.",
        rich_help_panel=FORM,
    ),
]
Out = Annotated[
    Path | None, typer.Option(help="Folder to write. Default: RUN/exports/NAME.", rich_help_panel=FORM)
]
BaseName = Annotated[
    str | None,
    typer.Option(
        help="Hub id that the export names as its base, for a local base model. Default: the run's base.",
        rich_help_panel=FORM,
    ),
]
CheckVllm = Annotated[
    bool, typer.Option("--check-vllm", help="Also check the export in vLLM.", rich_help_panel=PUBLISH)
]
Push = Annotated[
    str | None,
    typer.Option(
        metavar="OWNER/NAME",
        help="Upload to the hub, with the token in HF_TOKEN. Default: no upload.",
        rich_help_panel=PUBLISH,
    ),
]
Public = Annotated[
    bool, typer.Option("--public", help="Create the repository public.", rich_help_panel=PUBLISH)
]


def export(
    target: RunOrNewest = None,
    step: Step = None,
    best: Best = False,
    merge: Merge = False,
    merge_into: MergeInto = None,
    dtype: Dtype = None,
    gguf: Gguf = False,
    out: Out = None,
    base_name: BaseName = None,
    check_vllm: CheckVllm = False,
    push: Push = None,
    public: Public = False,
    as_json: AsJson = False,
) -> None:
    """Write the folder, print what its checks measured, and push it if asked."""
    flags = ExportFlags(
        run=target or newest_run(), step=step, best=best, merge=merge, merge_into=merge_into, gguf=gguf,
        dtype=dtype, out=out, base_name=base_name, push=push, public=public,
    )  # fmt: skip
    if check_vllm and gguf and not merge:
        raise ConfigError("--check-vllm cannot check a GGUF file.", "Remove it, or add --merge.")
    token = check_push(push) if push is not None else ""
    plan = plan_export(flags)
    form = "merged weights" if plan.has_merged_weights else "the adapter"
    logger.info(f"exporting {form} of {plan.name} for {plan.base_name} to {plan.out}")
    if plan.merged_into not in ("", plan.base_name):
        logger.info(f"merging into {plan.merged_into}")
    launcher = None
    if check_vllm:
        launcher = allowed_launcher(plan.run_config.config, Provenance(file=plan.served.adapter.path))
    checks = write_export(plan, launcher=launcher)
    for check in checks:
        logger.info(str(check))
        if check.note:
            logger.warning(check.note)
    facts = {"name": plan.name, "folder": str(plan.out), "checks": [asdict(check) for check in checks]}
    if not as_json:
        show(f"exported {plan.name} to {plan.out}")
    if push is not None:
        message = f"{plan.name} of a skylite run ({plan.out.name})"
        size = tree_bytes(plan.out)
        with long_work(f"pushing {size / 1e6:.0f} MB to {push}"):
            address = upload(plan.out, push, token, public=public, message=message)
        facts["pushed_to"] = address
        if not as_json:
            show(f"pushed to {address}")
    if as_json:
        show(json.dumps(facts))
