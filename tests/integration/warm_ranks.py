"""Trainer ranks as forks of one process that has imported torch and the trainer.

    python -m tests.integration.warm_ranks      (started by torchrun.py)

In: {"words": of the worker, "ranks": how many, "log": a path} as a line of stdin. Out: a line with the exit
codes. torchrun and its imports take longer than a tiny run, and few tests are about torchrun itself.
"""

from __future__ import annotations

import json
import os
import sys
import uuid
from typing import Any

import peft  # noqa: F401 -- the imports below are for the forks
import transformers  # noqa: F401

from skylite.trainer import loop, worker  # noqa: F401


def start_rank(rank: int, ranks: int, start: str, words: list[str], log: str) -> int:
    """Fork a rank with torchrun's environment; its process id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        with open(log, "ab", buffering=0) as stream:
            os.dup2(stream.fileno(), 1)
            os.dup2(stream.fileno(), 2)
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in names.items()} | {"TORCHELASTIC_RUN_ID": start}
        sys.argv = ["worker", *words]
        worker.main()
    finally:
        os._exit(1)


def train(words: list[str], ranks: int, log: str) -> list[int]:
    """Exit codes of the ranks. The first that fails ends the others, as under torchrun."""
    start = uuid.uuid4().hex
    running = {start_rank(rank, ranks, start, words, log) for rank in range(ranks)}
    codes = []
    while running:
        pid, status = os.wait()
        running.remove(pid)
        codes.append(os.waitstatus_to_exitcode(status))
        if codes[-1] != 0:
            for other in running:
                os.kill(other, 15)
    return codes


def main() -> None:
    for line in sys.stdin:
        work: dict[str, Any] = json.loads(line)
        print(json.dumps(train(work["words"], work["ranks"], work["log"])), flush=True)


if __name__ == "__main__":
    main()
