"""One rank of the service's trainer, started by torchrun: `-m skylite.trainer.service_worker FOLDER SOCKET`.

Consumes: config.json and the canary of the service's folder; commands of the front, which rank 0 receives at
SOCKET and shares. Waits for: the next command. Produces: replies, checkpoints, adapters. Unblocks: the front,
which answers its clients.
"""

from __future__ import annotations

import os

from skylite.processes.reaper import COMMAND_PID, die_with_parent

if __name__ == "__main__":
    die_with_parent(int(os.environ.get(COMMAND_PID, os.getppid())))

import select
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from skylite.config.loading import read_run_config
from skylite.errors import SkyliteError
from skylite.processes.frames import receive_frame, send_frame
from skylite.run.run_dir import RunDir
from skylite.trainer.worker import exit_now, exit_with_traceback

if TYPE_CHECKING:
    from skylite.trainer.policies import Policies

IDLE_S = 20.0
"""Without a command, rank 0 gives the others a sign of life this often."""
END: dict[str, Any] = {"verb": "end"}


def main() -> NoReturn:
    """Carry out commands until the front closes its socket."""
    run, path = RunDir(Path(sys.argv[1]).resolve()), sys.argv[2]
    sys.excepthook = lambda kind, error, trace: exit_with_traceback(run, kind, error, trace)
    serve(run, path)
    exit_now(0)


def serve(run: RunDir, path: str) -> None:
    """Load the base, then carry out one command after the other. Every rank gets each."""
    run_config = read_run_config(run.config_path)
    from skylite.model.process_group import make_deterministic, process_group, set_threads
    from skylite.trainer.canary import read_canary
    from skylite.trainer.micro_batch_memory import limit_gpu_memory
    from skylite.trainer.policies import load_policies

    config = run_config.config
    set_threads(config.trainer.num_threads)
    if config.trainer.deterministic:
        make_deterministic()
    with process_group(run_config.resolved.placement.device, run.rendezvous) as dist:
        limit_gpu_memory(run_config.resolved.memory, dist.device)
        policies = load_policies(run, run_config, read_canary(run), dist)
        front = socket.socket(socket.AF_UNIX)
        if dist.is_main:
            front.connect(path)
            send_frame(front, {"ready": True, "choices": policies.base.choices})
        while (command := dist.wait_for(lambda: _next(front))) != END:
            reply = carried_out(policies, command)
            if dist.is_main:
                send_frame(front, reply)


def carried_out(policies: Policies, command: dict[str, Any]) -> dict[str, Any]:
    """The reply to a command. All ranks refuse the same ones, so they stay in step.

    On one rank it also survives running out of memory: of several, the others wait for this one in a
    collective. Any other error than these ends the trainer.
    """
    from skylite.trainer.micro_batch_memory import first_line, free_memory, is_out_of_memory

    verb = command.pop("verb")
    try:
        return {"done": policies.verbs()[verb](**command)}
    except SkyliteError as error:
        return {"refused": str(error)}
    except Exception as error:
        if policies.base.dist.dp_size > 1 or not is_out_of_memory(error):
            raise
        reason = first_line(error)
    # Outside the handler, because the error holds the frames, and so the tensors, of the attempt.
    free_memory()
    # Not with smaller micro-batches: other requests of this client would get other bits than alone.
    return {
        "refused": f"The trainer ran out of memory on this request ({reason}), and dropped it. Send shorter "
        "or fewer sequences, or start the service with a smaller trainer.tokens_per_micro_batch."
    }


def _next(front: socket.socket) -> dict[str, Any] | None:
    """The next command of the front, END once it has closed its socket, or None after IDLE_S."""
    readable, _, _ = select.select([front], [], [], IDLE_S)
    if not readable:
        return None
    return receive_frame(front) or END


if __name__ == "__main__":
    main()
