"""Fast start of vLLM's API server on CPU: `python -m skylite.engine.vllm.plugin.cpu_server` with the server's
arguments.

On CPU, vLLM 0.32 starts API server, engine core and worker one after the other, and each imports torch and
vLLM, which takes most of the start. Here the API server imports everything once. The engine core is forked
from it, and the worker runs inside the engine core (vLLM's UniProcExecutor). vLLM separates the worker on CPU
to set up OpenMP in its environment; here the fork gets that environment.

In untested cases (another vLLM, another OpenMP library, several workers) this module prints why, and vLLM
starts in its own way.

Buys time: a server starts in 10.5 s instead of 26 (benchmarks/startup.py).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping

from skylite.engine.vllm.plugin import STOCK_SERVER, TESTED_VLLM
from skylite.engine.vllm.plugin.fork_server import WarmContext, import_early, start_fork_server
from skylite.engine.vllm.plugin.processes import SWITCH

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
MODULES = (
    "setproctitle",
    "vllm.entrypoints.launchers.api_server.entry",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
)
"""What API server, engine core and worker import."""


def main() -> None:
    """Replace vLLM's start of the engine core where tested, then run its server with the same arguments."""
    reason = why_not_fork(os.environ)
    if reason:
        print(f"skylite: vLLM starts in its own, slower way: {reason}", file=sys.stderr, flush=True)
    else:
        import_early(MODULES)
        start_fork_server(omp_settings(os.environ["VLLM_CPU_OMP_THREADS_BIND"]))
        sys.argv += ["--distributed-executor-backend", EXECUTOR]
        from vllm.v1.engine import utils

        utils.get_mp_context = WarmContext
    runpy.run_module(STOCK_SERVER, run_name="__main__", alter_sys=True)


def why_not_fork(env: Mapping[str, str]) -> str:
    """Why the engine core cannot be forked here, for a message; empty if it can."""
    version = _version("vllm-cpu") or _version("vllm")
    if not version.startswith(TESTED_VLLM):
        return f"this is tested with vLLM {TESTED_VLLM}x, not {version or 'another package of that name'}"
    if env.get(SWITCH) != "1":
        return "skylite did not start it"
    if "iomp" not in env.get("LD_PRELOAD", ""):
        return "Intel's OpenMP library is not preloaded (install it with `pip install intel-openmp`)"
    if not env.get("VLLM_CPU_OMP_THREADS_BIND", "").replace(",", "").isdigit():
        return "VLLM_CPU_OMP_THREADS_BIND does not name cores"
    return ""


def omp_settings(cpus: str) -> dict[str, str]:
    """vLLM's settings for a worker with Intel's OpenMP: one thread on each core of `cpus`, such as "0,1".

    Source: vllm/utils/ompmultiprocessing.py.
    """
    return {
        "OMP_NUM_THREADS": str(len(cpus.split(","))),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cpus}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def _version(package: str) -> str:
    """Version of the installed package if it provides the module `vllm`; else empty."""
    try:
        found = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    spec = importlib.util.find_spec("vllm")
    return (
        found.version
        if spec is not None and spec.origin == str(found.locate_file("vllm/__init__.py"))
        else ""
    )


if __name__ == "__main__":
    main()
