"""Ask a running vLLM server whether skylite's adapters can be served and exchanged on it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

import httpx

from skylite.config.train import TrainConfig
from skylite.doctor.checks import Finding, bad, note, ok
from skylite.engine.connections import KEY_VARIABLE, Address
from skylite.engine.vllm.launcher import RUNTIME_LORA, own_server_command
from skylite.engine.vllm.memory import served_rank
from skylite.engine.vllm.models import vllm_version
from skylite.errors import ConfigError, error_line
from skylite.untrusted_text import parse_json

TIMEOUT_S = 5.0
LARGEST_ANSWER = 4 << 20
CHECK = "engine"
OWN_ENGINES = "`skylite train` cannot use this server: a run starts engines of its own"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalServer:
    """The command line and environment of a server on this machine; this user may read them."""

    argv: tuple[str, ...]
    env: Mapping[str, str]

    @property
    def max_lora_rank(self) -> int:
        """--max-lora-rank, or vLLM's default."""
        return int(flag_value(self.argv, "--max-lora-rank") or 16)

    @property
    def tensor_parallel(self) -> int:
        """--tensor-parallel-size, or vLLM's default."""
        found = flag_value(self.argv, "--tensor-parallel-size") or flag_value(self.argv, "-tp") or "1"
        return int(found) if found.isdecimal() else 1


def probe_engine(url: str) -> list[Finding]:
    """Everything that can be seen from outside. Raises ConfigError for a URL that is none."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is not the URL of a server.", "Write it like http://127.0.0.1:8000.")
    with Address.parse(url, os.environ.get(KEY_VARIABLE)).client(TIMEOUT_S) as client:
        try:
            models = _models(client)
        except (httpx.HTTPError, ValueError) as error:
            fix = f"set {KEY_VARIABLE} if it asks for a key; else check that vLLM serves there"
            return [bad(CHECK, f"{url} does not answer as vLLM does: {error_line(error)}", fix)]
        local = local_server(parts.hostname, parts.port or (443 if parts.scheme == "https" else 80))
        facts = [_version(client), _lora(client, models, local), _updating(client), _rank(local)]
    if any(finding.level == "bad" for finding in facts):
        base = next((m for m in models if not m.get("parent")), models[0])
        command = own_server_command(
            str(base.get("root") or base["id"]), TrainConfig().lora.rank, parts.hostname, parts.port or 8000,
            tensor_parallel=1 if local is None else local.tensor_parallel,
        )  # fmt: skip
        facts = [replace(f, fix=f"start it with: {command}") if f.level == "bad" else f for f in facts]
    return [*facts, note(CHECK, OWN_ENGINES, "stop it before a run that needs its GPUs")]


def local_server(host: str, port: int) -> LocalServer | None:
    """The process that listens on this port of this machine; None if there is none that we may read."""
    import psutil

    if host not in ("localhost", "127.0.0.1", "::1"):
        return None
    try:
        found = next(
            c.pid for c in psutil.net_connections("tcp")
            if c.status == psutil.CONN_LISTEN and c.laddr.port == port and c.pid
        )  # fmt: skip
        process = psutil.Process(found)
        return LocalServer(argv=tuple(process.cmdline()), env=process.environ())
    except (StopIteration, psutil.Error):
        return None


def flag_value(argv: tuple[str, ...], flag: str) -> str | None:
    """The value of `--flag value` or `--flag=value`."""
    for index, word in enumerate(argv):
        if word == flag and index + 1 < len(argv):
            return argv[index + 1]
        if word.startswith(f"{flag}="):
            return word.partition("=")[2]
    return None


def _models(client: httpx.Client) -> list[dict[str, Any]]:
    answer = client.get("/v1/models")
    answer.raise_for_status()
    if len(answer.content) > LARGEST_ANSWER:
        raise ValueError("its list of models has several MB")
    body = parse_json(answer.content)
    models = body.get("data") if isinstance(body, dict) else None
    if (
        not isinstance(models, list)
        or not models
        or not all(isinstance(m, dict) and "id" in m for m in models)
    ):
        raise ValueError("it lists no models")
    return models


def _version(client: httpx.Client) -> Finding:
    try:
        body = parse_json(client.get("/version").content)
        version = str(body["version"])
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return note(CHECK, "it does not tell its version", "there: `pip list | grep -i vllm`")
    tested = vllm_version()
    if tested is not None and version.partition("+")[0] != tested:
        text = f"vLLM {version}, and this skylite is installed with {tested}"
        return note(CHECK, text, f"there: `pip install vllm=={tested}`")
    return ok(CHECK, f"vLLM {version}")


def _lora(client: httpx.Client, models: list[dict[str, Any]], local: LocalServer | None) -> Finding:
    try:
        has_metric = b"vllm:lora_requests_info" in client.get("/metrics").content[:LARGEST_ANSWER]
    except httpx.HTTPError:
        has_metric = False
    adapters = [str(m["id"]) for m in models if m.get("parent")]
    if adapters or has_metric or (local is not None and "--enable-lora" in local.argv):
        return ok(CHECK, f"LoRA is on; {len(adapters)} adapter(s) loaded")
    return bad(CHECK, "LoRA is off (--enable-lora)", "")


def _updating(client: httpx.Client) -> Finding:
    """The route exists only with runtime updating. An empty request changes nothing."""
    try:
        status = client.post("/v1/load_lora_adapter", json={}).status_code
    except httpx.HTTPError as error:
        fix = f"call doctor again; if it stays, start the server with {RUNTIME_LORA}=1"
        return note(CHECK, f"runtime updating is unknown: {error_line(error)}", fix)
    if status == httpx.codes.NOT_FOUND:
        return bad(CHECK, f"adapters cannot be loaded at run time ({RUNTIME_LORA} is not set)", "")
    return ok(CHECK, f"adapters can be loaded at run time ({RUNTIME_LORA}=1)")


def _rank(local: LocalServer | None) -> Finding:
    wanted = served_rank(TrainConfig().lora.rank)
    fix = f"start the server with --max-lora-rank {wanted}"
    if local is None:
        text = f"its largest LoRA rank is unknown from outside; skylite's default needs {wanted}"
        return note(CHECK, text, fix)
    try:
        rank = local.max_lora_rank
    except ValueError:
        return note(CHECK, "its --max-lora-rank is not a number", fix)
    if rank < wanted:
        return bad(CHECK, f"its largest LoRA rank is {rank}; skylite's default needs {wanted}", "")
    return ok(CHECK, f"LoRA rank up to {rank}")
