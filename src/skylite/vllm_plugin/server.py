"""vLLM's API server on a CPU in less than half of its start's time: `python -m skylite.vllm_plugin.server` with the server's own arguments.

vLLM 0.32 starts three processes on a CPU one after the other, server, engine core and worker, and each imports torch and vLLM anew: most of
its start. Here multiprocessing's fork server imports them beside the API server, and the engine core is forked out of it. The worker lives
in the engine core (vLLM's UniProcExecutor). vLLM keeps it apart on CPUs so that OpenMP can be set up in its environment; the fork server
is given that environment from its first moment.

Where this was not tested (another vLLM, another OpenMP library, several workers) the server is started as vLLM does it, which is said.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping

from skylite.vllm_plugin import STOCK_SERVER, TESTED_VLLM
from skylite.vllm_plugin.fork_server import WarmContext, start_fork_server
from skylite.vllm_plugin.lifetime import SWITCH

EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def main() -> None:
    """Replace vLLM's way to start its engine core where that is known to work, then run its server with this process's arguments."""
    reason = why_not_fork(os.environ)
    if reason:
        print(f"skylite: vLLM starts in its own, slower way: {reason}", file=sys.stderr, flush=True)
    else:
        start_fork_server(
            omp_settings(os.environ["VLLM_CPU_OMP_THREADS_BIND"])
        )  # first: it imports beside what this process imports
        sys.argv += ["--distributed-executor-backend", EXECUTOR]
        from vllm.v1.engine import utils

        utils.get_mp_context = WarmContext
    runpy.run_module(STOCK_SERVER, run_name="__main__", alter_sys=True)


def why_not_fork(env: Mapping[str, str]) -> str:
    """Why the engine core cannot be forked here, in words; empty where it can."""
    version = _version("vllm-cpu") or _version("vllm")
    if not version.startswith(TESTED_VLLM):
        return f"this is tested with vLLM {TESTED_VLLM}x, not {version or 'another package of that name'}"
    if env.get(SWITCH) != "1":
        return "skylite did not start it"
    if "iomp" not in env.get("LD_PRELOAD", ""):
        return "Intel's OpenMP library is not preloaded (pip install intel-openmp)"
    if not env.get("VLLM_CPU_OMP_THREADS_BIND", "").replace(",", "").isdigit():
        return "VLLM_CPU_OMP_THREADS_BIND does not name cores"
    return ""


def omp_settings(cpus: str) -> dict[str, str]:
    """What vLLM sets for a worker under Intel's OpenMP (vllm/utils/ompmultiprocessing.py): a thread on each of the cores "0,1"."""
    return {
        "OMP_NUM_THREADS": str(len(cpus.split(","))),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cpus}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def _version(package: str) -> str:
    """Of the installed package, if the module `vllm` is out of it; else empty."""
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
