"""Export an adapter as a PEFT folder, or as merged weights.

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
from skylite.export.plan import ExportFlags, plan_export
from skylite.export.run import export as write_export
from skylite.rollout.trusted_programs import allowed_launcher
from skylite.ui.logs import show

logger = logging.getLogger(__name__)


FORM = "What to write"
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
Dtype = Annotated[
    str | None,
    typer.Option(
        help="Of merged weights: float32, bfloat16 or float16. Default: the base model's.",
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
    bool, typer.Option("--check-vllm", help="Also check the export in vLLM.", rich_help_panel=FORM)
]


def export(
    target: RunOrNewest = None,
    step: Step = None,
    best: Best = False,
    merge: Merge = False,
    dtype: Dtype = None,
    out: Out = None,
    base_name: BaseName = None,
    check_vllm: CheckVllm = False,
    as_json: AsJson = False,
) -> None:
    """Write the folder and print what its checks measured."""
    flags = ExportFlags(
        run=target or newest_run(), step=step, best=best, merge=merge, dtype=dtype, out=out,
        base_name=base_name,
    )  # fmt: skip
    plan = plan_export(flags)
    form = "merged weights" if plan.merge else "the adapter"
    logger.info(f"exporting {form} of {plan.name} for {plan.base_name} to {plan.out}")
    launcher = None
    if check_vllm:
        launcher = allowed_launcher(plan.run_config.config, Provenance(file=plan.served.adapter.path))
    checks = write_export(plan, launcher=launcher)
    for check in checks:
        logger.info(str(check))
        if check.note:
            logger.warning(check.note)
    if as_json:
        facts = {"name": plan.name, "folder": str(plan.out), "checks": [asdict(check) for check in checks]}
        show(json.dumps(facts))
    else:
        show(f"exported {plan.name} to {plan.out}")
