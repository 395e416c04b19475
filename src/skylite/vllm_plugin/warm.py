"""What the fork server imports before it is asked for an engine core (`server.py`): to import this module there is to do it."""

from __future__ import annotations

import importlib
import os
import sys

from skylite.processes.parent_death import die_with_parent
from skylite.vllm_plugin.lifetime import SWITCH

MODULES = (
    "setproctitle",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)


def warm_up() -> None:
    """Import MODULES. The fork server ends with its starter: children hold the pipe by which it knows that it is needed."""
    die_with_parent(os.getppid())
    for name in MODULES:
        try:
            importlib.import_module(name)
        except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
            # The engine core will say it for itself, in its place.
            print(f"skylite: {name} cannot be imported early: {error}", file=sys.stderr, flush=True)
    if title := sys.modules.get("setproctitle"):
        title.getproctitle()  # finds the place of the title, which it cannot once the environment has been changed


if os.environ.get(SWITCH) == "1":
    warm_up()
