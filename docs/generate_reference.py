"""Write docs/reference/cli.md, config.md, metrics.md and models.md from the code.

    python docs/generate_reference.py        (or: make docs-reference)
    python docs/generate_reference.py --check        writes nothing, fails if a page is stale

cli.md holds what `--help` prints. config.md holds the fields, defaults and docstrings of skylite.config.
metrics.md holds skylite/run/metrics.toml, models.md skylite/hub/families.json.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.testing import CliRunner
from write_or_check import write_or_check

from skylite.adapters.target_modules import LATENT
from skylite.cli.main import app
from skylite.cli.models import HEAD, cells
from skylite.config.base_section import Flag
from skylite.config.train import TrainConfig
from skylite.engine.vllm.cpu_families import CpuFamily, read_cpu_families
from skylite.hub.families import Family, read_sweep
from skylite.run.metrics_file import Metric, metric_sections

REFERENCE = Path(__file__).resolve().parent / "reference"
MADE_BY = "<!-- Made by docs/generate_reference.py from the code. Do not edit: run `make docs-reference`. -->"
HELP_WIDTH = 100
LINE_WIDTH = 110

CLI_HEAD = """\
# Command line

What `skylite COMMAND --help` prints. Every setting without a flag is `--set section.key=value`: see
[config.md](config.md).

A default in parentheses is a description.

Exit codes: 0 is success, 1 a run that failed or a check that found damage, 2 bad input, 130 a stop by
Ctrl-C or SIGTERM.
"""

CONFIG_HEAD = """\
# Settings

What you type replaces what the recipe (TOML or YAML) says: the flag where a setting has one, else
`--set section.key=value`. `--set` takes TOML values, a bare word is a string, and `none` unsets. Quote lists
for the shell: `--set 'data.difficulty=[1, 2]'`. An unknown name is an error that suggests the closest one.

`skylite train --dry-run` prints the resolved settings. A run keeps them in `config.json`.

In a TOML recipe a section is a table. A recipe whose name ends in `.yaml` or `.yml` is YAML 1.2, without
anchors and tags:

    num_steps = 20              num_steps: 20

    [rollout]                   rollout:
    group_size = 8                group_size: 8
"""

METRICS_HEAD = """\
# Metrics

`metrics.jsonl` in the run has one JSON object per step. A number that is not finite is written as `null`.
After a resume a step that was trained again has two lines; the last one counts. `run.metrics` of
[`skylite.load_run`](python-api.md) is a table with that one alone. [Read the
curves](../how-to/read-the-curves.md) shows which of these to look at first.

Means are over the completions or tokens of the step, on all ranks. KL and log-probabilities are in nats.
Healthy ranges are rules of thumb: a run can leave one and learn.
"""


MODELS_HEAD = """\
# Model families

What [`skylite models`](cli.md#skylite-models) prints: every `model_type` of transformers
{sweep.transformers} that computes text, and what a sweep found (`make models-sweep`). `skylite models MODEL`
says it of one model, in seconds. A family that does not train is refused with its sentence there and by
`train --dry-run`.

The sweep makes a tiny random model of each family, loads, adapts and computes it as a run does, and compares
log-probabilities (largest difference in nats) and LoRA gradients (relative, float32) with transformers and
PEFT on padded rows. A difference over 1e-4 or 1e-5 refuses a family, as does a token that sees later ones.
What ran with real weights or in vLLM is in [Tested models](tested-models.md).

- trains: with a prefix tree a prompt is computed once for its completions; with padded rows in each of them.
- experts: LoRA where [`lora.target_parameters`](lora.md#experts) names them, else frozen, as routers always.
- other parts: towers that read pictures or sound. They stay as they are. Prompts are text, and have images
  where it says so.
- LoRA on GPU, LoRA on CPU: whether vLLM {sweep.vllm} serves it. A family that it does not serve still trains
  by `algorithm.name=sft` and `dpo`, which sample nothing.

A model whose attention is a function of its own, as GPT-J's and BLOOM's, keeps it, on padded rows; the run
says so. `{latent}` of latent attention gets no LoRA: engines fold it into other products.
"""

SERVED_HEAD = """\
## Tried in vLLM on a CPU

A second sweep (`make serving-sweep`) serves a tiny random model of each mixture of experts, and of some other
families, in vLLM {vllm} with skylite's plugin, on a CPU. It compares log-probabilities with the trainer's,
without an adapter and with one on each kind of module alone (largest difference in nats), and those of
sampled tokens with the same as a prompt. In float32 a difference over 1e-3 refuses a family or its experts'
LoRA, as does a kind of module of whose effect vLLM shows another share than 0.999 to 1.001. vLLM computes
gated delta nets in bfloat16 alone: there the limit is three times the rounding of the trainer's own bfloat16,
and the share 0.9 to 1.1. vLLM on a GPU has the same names and slots for experts; there they did not run.

| family | computes in | without adapter | with one | LoRA on experts |
|---|---|---|---|---|
"""


def pages() -> dict[Path, str]:
    """File -> text."""
    texts = {
        "cli.md": cli_page(),
        "config.md": config_page(),
        "metrics.md": metrics_page(),
        "models.md": models_page(),
    }
    return {REFERENCE / name: text for name, text in texts.items()}


def cli_page() -> str:
    """Every command's help."""
    return "\n".join([MADE_BY, "", CLI_HEAD, *command_texts()])


def command_texts() -> Iterator[str]:
    """A heading and the help text of each command, subcommands of a group included."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        for path in [f"{name} {sub}" for sub in getattr(command, "commands", {})] or [name]:
            yield f"## skylite {path}\n\n```text\n{help_text(path.split())}\n```\n"


def help_text(command: list[str]) -> str:
    """What `skylite COMMAND --help` prints on a terminal of HELP_WIDTH columns."""
    printed = CliRunner().invoke(
        app,
        [*command, "--help"],
        prog_name="skylite",
        terminal_width=HELP_WIDTH,
        max_content_width=HELP_WIDTH,
    )
    assert printed.exit_code == 0, printed.output
    return "\n".join(line.rstrip() for line in printed.output.strip().splitlines())


def config_page() -> str:
    """A table for each section of the settings."""
    parts = [MADE_BY, "", CONFIG_HEAD, "## Top level\n", *section_parts("", TrainConfig)]
    return "\n".join(parts).rstrip() + "\n"


def section_parts(prefix: str, section: type[BaseModel]) -> list[str]:
    """The table of a section, then those of the sections in it, each with a heading."""
    inner = {name: part for name, field in section.model_fields.items() if (part := section_of(field))}
    plain = {name: field for name, field in section.model_fields.items() if name not in inner}
    parts = [*table(prefix, plain), ""]
    for name, part in inner.items():
        dotted = f"{prefix}{name}"
        parts += [f"## {dotted}\n", *about(part), *section_parts(f"{dotted}.", part)]
    return parts


def metrics_page() -> str:
    """A table for each section of the metrics."""
    parts = [MADE_BY, "", METRICS_HEAD]
    for section in metric_sections():
        parts += [
            f"## {section.heading}\n",
            *([textwrap.fill(section.about, LINE_WIDTH), ""] if section.about else []),
        ]
        parts += ["| name | unit | meaning | healthy | a bad value |", "|---|---|---|---|---|"]
        parts += [*map(metric_row, section.metrics), ""]
    return "\n".join(parts).rstrip() + "\n"


def metric_row(metric: Metric) -> str:
    words = " | ".join(map(cell, (metric.unit, metric.meaning, metric.good, metric.bad)))
    return f"| `{metric.name}` | {words} |"


def models_page() -> str:
    """The table of families, and why some are not in it."""
    families = read_sweep().families.values()
    trained = [family for family in families if not family.refused]
    parts = [MADE_BY, "", MODELS_HEAD.format(sweep=read_sweep(), latent=LATENT), "## Families that train\n"]
    columns = (*HEAD, "log-probabilities", "gradient")
    parts += [f"| {' | '.join(columns)} |", "|" + "---|" * len(columns), *map(family_row, trained), ""]
    for device, heading in (("on_gpu", "GPUs"), ("on_cpu", "CPUs")):
        parts += [
            f"## Not served on {heading}\n",
            *grouped((f.name, getattr(f, device)) for f in trained),
            "",
        ]
    parts += [SERVED_HEAD.format(vllm=read_sweep().vllm) + "\n".join(map(served_row, served_families())), ""]
    parts += ["## Families that do not train\n", *grouped((f.name, f.refused) for f in families)]
    return "\n".join(parts).rstrip() + "\n"


def family_row(family: Family) -> str:
    gaps = (f"{family.logprobs:.0e}", f"{family.gradient:.0e}")
    return f"| `{family.name}` | {' | '.join((*cells(family)[1:], *gaps))} |"


def served_families() -> list[CpuFamily]:
    """Those of the sweep in vLLM that are not refused."""
    return [family for family in read_cpu_families().values() if not family.refused]


def served_row(family: CpuFamily) -> str:
    experts = {None: "", "": "yes"}.get(family.experts, f"no: vLLM {family.experts}")
    return f"| `{family.name}` | {family.dtype} | {family.base:.0e} | {family.lora:.0e} | {experts} |"


def grouped(reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Each reason with the names of its families, without what names a single one."""
    names: dict[str, list[str]] = {}
    for name, sentence in reasons:
        reason = re.sub(r"^(The model|\S+) is a \w+(, and|:|,) | \(\w+=\d+\)", "", sentence).rstrip(".")
        if reason:
            names.setdefault(reason, []).append(f"`{name}`")
    for reason, group in names.items():
        text = f"- {cell(reason)}: {', '.join(group)}"
        yield textwrap.fill(text, LINE_WIDTH, subsequent_indent="  ", break_on_hyphens=False)


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The class of a section, None for a plain setting."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def about(section: type[BaseModel]) -> list[str]:
    """The section's own docstring, if it has one."""
    text = vars(section).get("__doc__") or ""
    return [textwrap.fill(one_line(text), LINE_WIDTH), ""] if text else []


def table(prefix: str, fields: dict[str, FieldInfo]) -> list[str]:
    """Markdown lines of a table with a row for each setting."""
    rows = [
        f"| {' | '.join([setting_text(prefix + name, field), type_text(field), default_text(field)])} | "
        f"{cell(field.description or '')} |"
        for name, field in fields.items()
    ]
    return ["| setting | type | default | meaning |", "|---|---|---|---|", *rows]


def setting_text(name: str, field: FieldInfo) -> str:
    """The setting, with its flag of `skylite train` if it has one."""
    return "".join([f"`{name}`", *(f", `{part.name}`" for part in field.metadata if isinstance(part, Flag))])


def type_text(field: FieldInfo) -> str:
    """`int, at least 1`."""
    bounds = [text for part in field.metadata if (text := bound_text(part))]
    return ", ".join([kind_text(field.annotation), *bounds])


def kind_text(kind: Any) -> str:
    """A type in words; the values of a Literal."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin is Annotated:
        bounds = [
            t for extra in arguments[1:] for m in getattr(extra, "metadata", [extra]) if (t := bound_text(m))
        ]
        return ", ".join([kind_text(arguments[0]), *bounds])
    if origin is list:
        return f"list of {kind_text(arguments[0])}"
    if origin is not None and (origin is Union or origin.__name__ in ("Union", "UnionType")):
        return " or ".join("none" if part is type(None) else kind_text(part) for part in arguments)
    name: str = kind.__name__
    return {"str": "text", "bool": "true, false"}.get(name, name)


def bound_text(part: Any) -> str:
    """One constraint of pydantic in words."""
    words = {"ge": "at least", "gt": "over", "le": "at most", "lt": "under"}
    found = [
        f"{word} {getattr(part, name):g}"
        for name, word in words.items()
        if getattr(part, name, None) is not None
    ]
    return " and ".join(found)


def default_text(field: FieldInfo) -> str:
    """As one would type it."""
    value = field.default if field.default is not PydanticUndefined else ""
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    return "`none`" if value is None else f"`{value:g}`" if isinstance(value, float) else f"`{value}`"


def cell(text: str) -> str:
    """Text for a table cell."""
    return one_line(text).replace("|", "\\|")


def one_line(text: str) -> str:
    return re.sub(r"\s+", " ", text).strip()


if __name__ == "__main__":
    write_or_check(pages(), __doc__)
