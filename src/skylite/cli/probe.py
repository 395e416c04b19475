"""Check whether a vLLM server applies an adapter.

To every kind of module, and deep into a text; for servers that other programs run. Loads base and adapter
here in float32, and compares logprobs. Exits 1 unless the adapter is applied.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from skylite.adapters.folder import find_adapter
from skylite.cli.options import AsJson, Step
from skylite.engine.chat import longest_sequence, served_adapters, served_models
from skylite.engine.connections import KEY_VARIABLE, Address
from skylite.engine.interface import Engine
from skylite.engine.launchers import client_of
from skylite.errors import ConfigError
from skylite.export.probe import (
    AdaptedModel,
    Probe,
    ServerScores,
    Share,
    judge,
    probe_text,
    sequences_of,
)
from skylite.hub.resolve import resolve_model
from skylite.progress_reporting import long_work
from skylite.types import EncodedPrompt
from skylite.ui.logs import show
from skylite.untrusted_files import read_text
from skylite.untrusted_text import plain

TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class Served:
    """Names on the server."""

    adapter: str
    base: str | None
    """None: it is not served beside the adapter."""


def probe(
    url: Annotated[str, typer.Argument(help="The server, e.g. http://127.0.0.1:8000.")],
    adapter: Annotated[Path, typer.Option(help="A PEFT folder or a run: what the server should apply.")],
    base: Annotated[str | None, typer.Option(help="Base model. Default: that of the adapter.")] = None,
    step: Step = None,
    name: Annotated[
        str | None, typer.Option(help="The adapter's name on the server. Default: its only adapter.")
    ] = None,
    text: Annotated[
        Path | None, typer.Option(help="Text to score, such as completions. Default: small sums.")
    ] = None,
    depth: Annotated[int, typer.Option(min=64, help="Tokens of the longest text.")] = 1024,
    as_json: AsJson = False,
) -> None:
    """Print how much of each part is applied, and a verdict. The key is in SKYLITE_API_KEY."""
    served = find_adapter(adapter, step)
    model = resolve_model(base or served.base_model).path
    address = Address.parse(url, os.environ.get(KEY_VARIABLE))
    with address.client(TIMEOUT_S) as http:
        names = choose_names(url, name, served_models(http, url), served_adapters(http, url))
        longest = longest_sequence(http, url)
    token_ids = encoded(model, probe_text() if text is None else read_text(text))
    depth = min(depth, len(token_ids), longest - 1 if longest else depth)
    short, long = sequences_of(token_ids, depth)
    with long_work("asking the server"):
        scores = asyncio.run(ask(address, names, short, long))
    with long_work("loading the base model and the adapter in float32"):
        adapted = AdaptedModel(model, served.adapter.path)
    with long_work("computing the logprobs that are right"):
        found = judge(adapted, short, long, scores)
    show(json.dumps(asdict(found), indent=1) if as_json else probe_report(found, names))
    if not found.is_applied:
        sys.exit(1)


def choose_names(url: str, name: str | None, names: list[str], adapters: list[str]) -> Served:
    """The names to ask for. Raises ConfigError if they are not clear."""
    listed = ", ".join(map(plain, names)) or "no model"
    if name is not None and name not in names:
        raise ConfigError(f"{plain(url)} serves {listed}, and not {name}.", "Give one of these with --name.")
    if name is None and (len(adapters) > 1 or not names):
        raise ConfigError(f"{plain(url)} serves {listed}.", "Choose the adapter with --name.")
    chosen = name or (adapters or names)[0]
    bases = [other for other in names if other not in adapters and other != chosen]
    return Served(chosen, bases[0] if bases else None)


def encoded(model: Path, text: str) -> list[int]:
    """Token ids of the text. Raises ConfigError if they are too few."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    token_ids: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
    if len(token_ids) < 128:
        raise ConfigError(f"The text has {len(token_ids)} tokens.", "Give one of at least 128 with --text.")
    return token_ids


async def ask(address: Address, names: Served, short: list[list[int]], long: list[int]) -> ServerScores:
    """One at a time: what an engine computes together rounds in other ways. Raises RunFailed."""
    engine = client_of("the server", address)
    try:
        answers = [await score_all(engine, n, [*short, long]) for n in (names.adapter, names.base) if n]
    finally:
        await engine.aclose()
    parts = [(np.concatenate(rows[:-1]), np.array(rows[-1])) for rows in answers]
    return ServerScores(*parts[0], *(parts[1] if len(parts) > 1 else ()))


async def score_all(engine: Engine, name: str, sequences: list[list[int]]) -> list[list[float]]:
    return [await engine.score(name, EncodedPrompt(tuple(ids))) for ids in sequences]


def share_text(share: Share) -> str:
    """The share, and how far from 1 a right one may be."""
    return f"{share.share:.3f} (1 +- {share.limit:.2g})" if share.is_told else "too small to tell"


def probe_report(found: Probe, names: Served) -> str:
    """A table of the parts, the differences, and the verdict."""
    rows = [("kind of module", "applied (1 is all)")]
    rows += [(kind, share_text(share)) for kind, share in found.kinds.items()]
    rows += [("", ""), ("tokens", "applied")]
    rows += [(part, share_text(share)) for part, share in found.depths.items()]
    width = max(len(left) for left, _ in rows)
    lines = [f"{left:<{width}}  {right}".rstrip() for left, right in rows]
    noise = "not served beside it" if found.noise is None else f"{found.noise:.2g}"
    lines += [
        "",
        f"root mean square in nats: the adapter moves the base by {found.moved:.2g}; the server is "
        f"{found.gap:.2g} from the adapter, {found.unexplained:.2g} unexplained; its base is {noise} off",
        f"{plain(names.adapter)}: {found.verdict}",
    ]
    return "\n".join(lines)
