"""What a model can do, how it trains, and who serves it.

Without a model: the table of all families. Starts nothing; takes seconds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from skylite.cli.options import AsJson
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.config.loading import load_config
from skylite.config.provenance import Provenance
from skylite.engine.launchers import load_launcher
from skylite.engine.model_check import ModelFacts, describe_model
from skylite.hub.families import Family, read_sweep
from skylite.hub.resolve import resolve_model
from skylite.hub.text_model import IMAGE_MODELS
from skylite.ui.logs import show

HEAD = ("family", "trains", "experts", "other parts", "LoRA on GPU", "LoRA on CPU")


class ModelsFlags(Flags):
    """The flags of `skylite models`."""

    provenance: Provenance
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A hub id or a folder. Default: all families.")
    ] = None
    as_json: AsJson = False


@takes_settings(("lora.from_adapter", "data.chat_template"))
def models(flags: ModelsFlags) -> None:
    """Print the facts of a model, or the table of families. Raises SkyliteError for one that cannot train."""
    if flags.model is None:
        families = list(read_sweep().families.values())
        show(json.dumps([asdict(f) for f in families], indent=1) if flags.as_json else table_text(families))
        return
    config = load_config(None, flags.provenance)
    facts = describe_model(config, resolve_model(flags.model), load_launcher(config, {}))
    show(json.dumps(asdict(facts), indent=1) if flags.as_json else facts_text(facts))


def facts_text(facts: ModelFacts) -> str:
    """A line for each fact."""
    rows = {
        "model": f"{facts.name} ({facts.architecture})",
        "trains": facts.trains,
        "tested": facts.tested,
        "LoRA": ", ".join(facts.lora),
        "experts": facts.experts,
        "images": facts.images,
        "quantised": facts.quantised,
        "LoRA on GPU": facts.served["cuda"],
        "LoRA on CPU": facts.served["cpu"],
        "context": f"{facts.context:,} tokens" if facts.context else "not in config.json",
        "chat template": facts.chat_template,
        "torchvision": facts.torchvision,
    }
    lines = [f"{name:<14} {text}" for name, text in rows.items()]
    return "\n".join([*lines, *(f"note: {note}" for note in facts.notes)])


def table_text(families: Sequence[Family]) -> str:
    """Those that train in columns, then each refused one with its reason."""
    rows = [HEAD, *map(cells, (f for f in families if not f.refused))]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEAD))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*lines, "", "Not trained:", *refused_lines(families)])


def cells(family: Family) -> tuple[str, ...]:
    """A row of the table, under HEAD."""
    return (
        family.name,
        "prefix tree" if family.packing == "tree" else "padded rows",
        "LoRA" if family.expert_lora else "frozen" if family.experts else "",
        "images" if family.name in IMAGE_MODELS else "yes" if family.parts else "",
        "no" if family.on_gpu else "yes",
        "no" if family.on_cpu else "yes",
    )


def refused_lines(families: Sequence[Family]) -> Iterator[str]:
    """Name and reason."""
    return (f"{f.name}: {f.refused}" for f in families if f.refused)
