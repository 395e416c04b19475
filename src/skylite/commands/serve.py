"""`skylite serve`: vLLM's OpenAI server with the trained adapter, in the foreground."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from skylite.commands.adapter_folder import find_adapter
from skylite.launch.machine import choose_device, choose_dtype
from skylite.launch.vllm_server import EngineSpec, engine_env, serve_command
from skylite.models import resolve_model


def serve(target: Path, *, model: str | None, step: int | None, port: int) -> None:
    """Become the server (exec): Ctrl-C ends it. The adapter answers as `policy-v000012`, the base under its own path."""
    served = find_adapter(target, step)
    device = choose_device()
    spec = EngineSpec(
        name="serve",
        model_path=resolve_model(model or served.base_model).path,
        device=device,
        dtype=choose_dtype("auto", device)[0],
        max_lora_rank=served.rank,
        target_modules=served.target_modules,
    )
    print(f"skylite: serving {served.adapter.name} from {served.adapter.path} on http://127.0.0.1:{port}/v1", file=sys.stderr, flush=True)
    argv = serve_command(spec, adapter_name=served.adapter.name, adapter_path=served.adapter.path, port=port)
    os.execvpe(argv[0], argv, engine_env(spec, os.environ))
