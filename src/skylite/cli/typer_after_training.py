"""The command line of what follows training: eval, serve, chat, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.options import (
    AsJson,
    ChatTemplateFile,
    RunOrNewest,
    Settings,
    TemplateArgs,
    Verbose,
    newest_run,
    numbers,
    template_settings,
)
from skylite.cli.typer_help import Commands

after_training_app = Commands("Use an adapter")
WHICH, PROBLEMS, SAMPLING, FORM, PUBLISH, SERVER = (
    "Which adapter", "Problems and samples", "Sampling", "What to write", "Check and upload", "Server",
)  # fmt: skip


Target = Annotated[Path | None, typer.Argument(help="A run or an adapter folder. Default: the newest run.")]
Base = Annotated[
    bool,
    typer.Option(
        "--base",
        help="Evaluate the base model; with a run, compare its adapters with it.",
        rich_help_panel=WHICH,
    ),
]
Model = Annotated[
    str | None,
    typer.Option(help="Base model. Default: that of the run or adapter.", rich_help_panel=WHICH),
]
Data = Annotated[
    list[Path] | None,
    typer.Option(
        help="Folder written by `skylite prepare`. Repeatable. Default: that of the run.",
        rich_help_panel=PROBLEMS,
    ),
]
Episode = Annotated[
    str | None,
    typer.Option(
        "--env",
        help="Episodes of several turns, as of `skylite train --env`. Default: those of the run.",
        rich_help_panel=PROBLEMS,
    ),
]
Split = Annotated[str, typer.Option(help="train, validation or test.", rich_help_panel=PROBLEMS)]
Limit = Annotated[
    int | None,
    typer.Option(
        min=1,
        help="Evaluate the first N problems of each data set only. Default: all.",
        rich_help_panel=PROBLEMS,
    ),
]
N = Annotated[
    int,
    typer.Option(
        "--n",
        min=1,
        help="Samples per problem. 1: greedy. More: temperature 1, with pass@k.",
        rich_help_panel=PROBLEMS,
    ),
]
Step = Annotated[
    int | None,
    typer.Option(help="Adapter version of the run. Default: the newest.", rich_help_panel=WHICH),
]
Steps = Annotated[
    str,
    typer.Option(
        help="Several versions on one engine, e.g. 0,50,100. Compares with the first. Default: one version.",
        rich_help_panel=WHICH,
    ),
]
AllSteps = Annotated[
    bool, typer.Option("--all", help="All versions that the run keeps.", rich_help_panel=WHICH)
]
MaxLoras = Annotated[
    int,
    typer.Option(min=1, help="Adapters in the engine at once. More need more memory.", rich_help_panel=WHICH),
]
Seed = Annotated[
    int, typer.Option(min=0, help="Seed of sampling and of the bootstrap.", rich_help_panel=PROBLEMS)
]


@after_training_app.command("eval")
def evaluate(
    target: Target = None,
    base: Base = False,
    model: Model = None,
    data: Data = None,
    env: Episode = None,
    split: Split = "test",
    limit: Limit = None,
    n: N = 1,
    step: Step = None,
    steps: Steps = "",
    all_steps: AllSteps = False,
    max_loras: MaxLoras = 4,
    seed: Seed = 0,
    as_json: AsJson = False,
    chat_template: ChatTemplateFile = None,
    template_arg: TemplateArgs = None,
    settings: Settings = None,
    verbose: Verbose = None,
) -> None:
    """Evaluate adapters or the base model on held-out problems. Prints accuracies with 95 % intervals.

    Writes per-problem results to RUN/evals, or to ./evals without a run.
    """
    from skylite.cli.evaluate import EvalFlags
    from skylite.cli.evaluate import evaluate as run_eval

    run_eval(
        EvalFlags(
            target=target or (None if base else newest_run()), base=base, model=model,
            data=tuple(data or ()), split=split, limit=limit, n=n,
            step=step, steps=numbers(steps), all_steps=all_steps, max_loras=max_loras, seed=seed,
            as_json=as_json,
            settings=(
                *template_settings(chat_template, template_arg),
                *([] if env is None else [f"env.episode={json.dumps(env)}"]),
                *(settings or ()),
            ),
        )
    )  # fmt: skip


@after_training_app.command()
def serve(
    target: Annotated[Path, typer.Argument(help="A run or an adapter folder.")],
    model: Model = None,
    step: Step = None,
    host: Annotated[
        str,
        typer.Option(
            help="IP address to listen on. Beyond this machine only the API key protects the server, over "
            "plain HTTP. 0.0.0.0: all addresses.",
            rich_help_panel=SERVER,
        ),
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Its port.", rich_help_panel=SERVER)] = 8000,
    settings: Settings = None,
    verbose: Verbose = None,
) -> None:
    """Serve an adapter on 127.0.0.1. Starts vLLM's OpenAI-compatible server and prints a random API key.

    Ends at Ctrl-C or SIGTERM.
    """
    from skylite.cli.serve import ServeFlags
    from skylite.cli.serve import serve as run_serve

    run_serve(
        ServeFlags(
            target=target, model=model, step=step, host=host, port=port, settings=tuple(settings or ())
        )
    )


@after_training_app.command()
def chat(
    target: Annotated[
        Path | None, typer.Argument(help="A run or an adapter folder. Not needed with --url.")
    ] = None,
    model: Model = None,
    step: Step = None,
    base: Annotated[
        bool,
        typer.Option("--base", help="Chat with the base model, without the adapter.", rich_help_panel=WHICH),
    ] = False,
    url: Annotated[
        str | None,
        typer.Option(
            help="Talk to a running `skylite serve`, e.g. http://127.0.0.1:8000. Default: start vLLM.",
            rich_help_panel=WHICH,
        ),
    ] = None,
    system: Annotated[
        str | None,
        typer.Option(
            help="System prompt. Default: system prompt and examples of the training data.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.", rich_help_panel=SAMPLING)] = 0.7,
    max_tokens: Annotated[int, typer.Option(min=1, help="Longest answer.", rich_help_panel=SAMPLING)] = 512,
    settings: Settings = None,
    verbose: Verbose = None,
) -> None:
    """Chat with an adapter in the terminal. Starts vLLM, or talks to a running server with --url.

    /quit ends, /reset forgets the conversation.
    """
    from skylite.cli.chat import ChatFlags
    from skylite.cli.chat import chat as run_chat

    run_chat(
        ChatFlags(
            target=target, model=model, step=step, base=base, url=url, system=system,
            temperature=temperature, max_tokens=max_tokens, settings=tuple(settings or ()),
        )
    )  # fmt: skip


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


@after_training_app.command()
def export(
    target: RunOrNewest = None,
    step: Step = None,
    best: Best = False,
    merge: Merge = False,
    dtype: Dtype = None,
    gguf: Gguf = False,
    out: Out = None,
    base_name: BaseName = None,
    check_vllm: CheckVllm = False,
    push: Push = None,
    public: Public = False,
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """Export an adapter as a PEFT folder, merged weights or GGUF.

    Adds a model card. Loads the result again and compares its logprobs with the trainer's. Writes a complete
    folder or nothing.
    """
    from skylite.cli.export import export as run_export
    from skylite.export.plan import ExportFlags

    run_export(
        ExportFlags(
            run=target or newest_run(), step=step, best=best, merge=merge, gguf=gguf, dtype=dtype, out=out,
            base_name=base_name, check_vllm=check_vllm, push=push, public=public,
        ),
        as_json=as_json,
    )  # fmt: skip
