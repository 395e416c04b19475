"""Parse command lines of skylite with vLLM's own parser, on any machine: JSON in, JSON out.

    python -m tests.integration.parsed_flags < COMMANDS.json

COMMANDS.json: {"commands": lists of flags, "free": {"total": bytes, "free": bytes, "share": number}}.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any


def parsed(flags: list[str]) -> dict[str, Any]:
    """What `vllm serve` understands. vLLM ends the process at a flag that it does not know."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    args = make_arg_parser(FlexibleArgumentParser()).parse_args(flags)
    validate_parsed_serve_args(args)
    engine = AsyncEngineArgs.from_cli_args(args)
    return {name: value for name, value in {**vars(args), **vars(engine)}.items() if is_plain(value)}


def is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | list | dict | None)


def starts(total: int, free: int, share: float) -> bool:
    """Whether vLLM starts when so much of a GPU is free."""
    from vllm.v1.worker.utils import request_memory

    snapshot: Any = SimpleNamespace(total_memory=total, free_memory=free, device_="cuda:0")
    cache: Any = SimpleNamespace(gpu_memory_utilization=share)
    try:
        request_memory(snapshot, cache)
    except ValueError:
        return False
    return True


def main() -> None:
    work = json.load(sys.stdin)
    found = {
        "commands": [parsed(flags) for flags in work["commands"]],
        "starts": [starts(*case) for case in work["free"]],
    }
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    main()
