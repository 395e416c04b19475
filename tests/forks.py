"""Run a function in a fork of this process."""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from collections.abc import Callable
from typing import Any


def in_a_fork(work: Callable[[], Any], limit_s: float | None = None) -> str:
    """What `work` returns, as JSON. Empty if the fork died or `work` raised; stderr says why.

    Raises TimeoutError, and kills the fork, if it does not answer within `limit_s`.
    """
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.write(write_end, json.dumps(work()).encode())
        except BaseException:  # noqa: BLE001 a fork must not continue as its parent
            traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end, "rb") as stream:
        answered = bool(select.select([stream], [], [], limit_s)[0])
        if not answered:
            os.kill(pid, signal.SIGKILL)
        text = stream.read().decode()
    _, status = os.waitpid(pid, 0)
    if not answered:
        raise TimeoutError(f"the fork did not answer within {limit_s:.0f} s")
    if status != 0:
        print(f"the fork ended with {os.waitstatus_to_exitcode(status)}", file=sys.stderr, flush=True)
    return text
