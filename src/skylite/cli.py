"""The command line: flags to commands, nothing else. Heavy imports happen inside the commands, so that --help is quick."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from skylite.errors import SkyliteError, write_failed

app = typer.Typer(
    name="skylite",
    help="Train a LoRA adapter with reinforcement learning on one machine: FSDP2 trains, vLLM samples, every sync is verified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # its boxes take as long as all the rest of --help
)

adapters_app = typer.Typer(
    help="The published adapters of a run.", no_args_is_help=True, rich_markup_mode=None
)
app.add_typer(adapters_app, name="adapters")

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="Any other setting, TOML syntax; repeatable."),
]


@app.command()
def prepare(
    target: Annotated[
        str,
        typer.Argument(help="gsm8k, reasoning-gym:TASK, a data_prep file, or your .jsonl, .csv or .parquet."),
    ],
    out: Annotated[Path | None, typer.Option(help="Folder to write; default data/NAME.")] = None,
    source: Annotated[
        Path | None, typer.Option(help="Folder with the released files instead of the hub.")
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Generate problems in the data set's format.")
    ] = False,
    first_source: Annotated[
        bool, typer.Option("--first-source", help="The first that works: hub, --source, synthetic.")
    ] = False,
    difficulty: Annotated[str, typer.Option(help="Stand-in: reasoning steps, e.g. 1,2.")] = "",
    question: Annotated[str | None, typer.Option(help="Question column of your file.")] = None,
    answer: Annotated[str | None, typer.Option(help="Answer column of your file.")] = None,
    reward: Annotated[str | None, typer.Option(help="gsm8k, math, or FILE.py:function.")] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Rows of the training split.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of generation and splits.")] = 0,
) -> None:
    """Write train, validation and test parquet files, every row checked against its reward."""
    from skylite.commands.prepare import prepare as run

    run(target, out=out, source=source, synthetic=synthetic, first_source=first_source, difficulty=_numbers(difficulty), question=question,
        answer=answer, reward=reward, limit=limit, seed=seed)  # fmt: skip


@app.command()
def train(
    recipe: Annotated[
        str | None, typer.Option(help="TOML file or a name in recipes/; default: the one for this machine.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, or smollm2-135m.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder made by `skylite prepare`.")] = None,
    rank: Annotated[int | None, typer.Option(help="LoRA rank.")] = None,
    alpha: Annotated[float | None, typer.Option(help="LoRA alpha.")] = None,
    steps: Annotated[int | None, typer.Option(help="Steps in all.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Completions a prompt.")] = None,
    seed: Annotated[int | None, typer.Option(help="Of data order, sampling and initialisation.")] = None,
    from_adapter: Annotated[
        Path | None, typer.Option(help="Warm start: adapter folder that version 0 begins as.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder; default runs/RECIPE-DATE.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Go on with this run from its newest whole checkpoint.")
    ] = None,
    at: Annotated[
        int | None, typer.Option(min=0, help="With --resume: the checkpoint's step; 0 is the start.")
    ] = None,
    max_hours: Annotated[
        float | None, typer.Option(min=0, help="Stop between two steps in time, leaving a run to resume.")
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="Go on by itself when the trainer dies, so often.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved settings, start nothing.")
    ] = False,
    settings: Settings = None,
) -> None:
    """Train: sample with vLLM, score, update with FSDP2, publish the adapter, hot-reload it, verify it; every step."""
    from skylite.commands.train import TrainFlags
    from skylite.commands.train import train as run_train

    flags = TrainFlags(recipe=recipe, model=model, data=data, rank=rank, alpha=alpha, steps=steps, lr=lr, group_size=group_size,
                       seed=seed, from_adapter=from_adapter, max_restarts=max_restarts, settings=tuple(settings or ()))  # fmt: skip
    run_train(flags, run=run, resume=resume, dry_run=dry_run, at=at, max_hours=max_hours)


@app.command("eval")
def evaluate(
    target: Annotated[Path | None, typer.Argument(help="A run or an adapter folder.")] = None,
    base: Annotated[bool, typer.Option("--base", help="The model without an adapter.")] = False,
    model: Annotated[str | None, typer.Option(help="Base model; default: the run's or adapter's.")] = None,
    data: Annotated[Path | None, typer.Option(help="Prepared folder; default: the run's.")] = None,
    split: Annotated[str, typer.Option(help="train, validation or test.")] = "test",
    limit: Annotated[int | None, typer.Option(min=1, help="First N problems.")] = None,
    n: Annotated[
        int, typer.Option("--n", min=1, help="1: greedy. More: mean of N samples at temperature 1.")
    ] = 1,
    step: Annotated[int | None, typer.Option(help="Adapter version of a run; default: the newest.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Of sampling.")] = 0,
    settings: Settings = None,
) -> None:
    """pass@1 on held-out problems through vLLM, with a 95 % interval; per-problem results in parquet."""
    from skylite.commands.evaluate import EvalFlags
    from skylite.commands.evaluate import evaluate as run_eval

    run_eval(EvalFlags(target=target, base=base, model=model, data=data, split=split, limit=limit, n=n, step=step, seed=seed,
                       settings=tuple(settings or ())))  # fmt: skip


@app.command()
def serve(
    target: Annotated[Path, typer.Argument(help="A run or an adapter folder.")],
    model: Annotated[str | None, typer.Option(help="Base model; default: the run's or adapter's.")] = None,
    step: Annotated[int | None, typer.Option(help="Adapter version of a run; default: the newest.")] = None,
    port: Annotated[int, typer.Option(min=1, max=65535, help="On 127.0.0.1.")] = 8000,
) -> None:
    """Serve the trained adapter with vLLM's OpenAI API on 127.0.0.1."""
    from skylite.commands.serve import serve as run_serve

    run_serve(target, model=model, step=step, port=port)


@app.command()
def replay(
    target: RunFolder,
    step: Annotated[int, typer.Option(min=1, help="The step to train again.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set", metavar="A.B=VALUE", help="Name a program that the run uses; changes no setting."
        ),
    ] = None,
) -> None:
    """Train a step again from its stored rollouts and checkpoint: equal (exit 0), or the difference of each tensor (exit 1)."""
    from skylite.commands.replay import replay as run_replay

    run_replay(target, step, tuple(settings or ()))


@adapters_app.command("verify")
def adapters_verify(target: RunFolder) -> None:
    """Hash every published adapter against its manifest and name the damaged ones (exit 1)."""
    from skylite.commands.adapters import verify

    verify(target)


@adapters_app.command("list")
def adapters_list(target: RunFolder) -> None:
    """Version, step, bytes, age and canary of every published adapter."""
    from skylite.commands.adapters import list_versions

    list_versions(target)


@adapters_app.command("gc")
def adapters_gc(target: RunFolder) -> None:
    """Remove adapters and checkpoints that the run's keep rules do not need, saying what."""
    from skylite.commands.adapters import gc

    gc(target)


def _numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a list of whole numbers like 1,2") from None


def main() -> None:
    """Run the command line. A SkyliteError becomes one message on stderr and its exit code."""
    try:
        app()
    except SkyliteError as error:
        print(f"skylite: {error}", file=sys.stderr)
        log_tail = getattr(error, "log_tail", "")
        if log_tail:
            print(f"\nThe last lines of its log:\n{log_tail}", file=sys.stderr)
        sys.exit(error.exit_code)
    except OSError as error:
        # Nearly every write says for itself what it was doing; this is for the rest (a folder made, an old file removed).
        print(f"skylite: {write_failed(error)}", file=sys.stderr)
        sys.exit(1)
