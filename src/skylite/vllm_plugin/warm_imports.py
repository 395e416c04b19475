"""Modules that the fork server (`fork_server.py`) imports in advance, by importing this module."""

from __future__ import annotations

import importlib
import os
import sys

from skylite.processes.parent_death import die_with_parent
from skylite.vllm_plugin.exit_with_parent import SWITCH

MODULES = (
    "setproctitle",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)


def warm_up() -> None:
    """Import MODULES, and let the kernel kill the fork server when its starter exits.

    The fork server cannot detect that exit itself: its children keep its pipe open.
    """
    die_with_parent(os.getppid())
    for name in MODULES:
        try:
            importlib.import_module(name)
        except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
            # The engine core will raise the same error when it imports the module.
            print(f"skylite: {name} cannot be imported early: {error}", file=sys.stderr, flush=True)
    if title := sys.modules.get("setproctitle"):
        title.getproctitle()  # must locate the title before the environment changes


if os.environ.get(SWITCH) == "1":
    warm_up()
