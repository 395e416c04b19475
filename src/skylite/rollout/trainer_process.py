"""The trainer's process on a machine."""

from __future__ import annotations

from skylite.config.train import RunConfig
from skylite.processes.child import ProcessSpec
from skylite.processes.hardware import threads_per_rank
from skylite.processes.hosts import TrainerStart
from skylite.processes.torchrun import trainer_command, trainer_env
from skylite.rollout.failures import TRAINER
from skylite.run.run_dir import RunDir


def trainer_process(
    run: RunDir, recorded: RunConfig, start: TrainerStart, *, host: int = 0, interface: str | None = None
) -> ProcessSpec:
    """torchrun with the ranks of this machine.

    `host`: the number of this machine. `interface`: of its ranks; None: trainer.interface.
    """
    trainer, name = recorded.config.trainer, f"{TRAINER}-host-{host}" if host else TRAINER
    return ProcessSpec(
        name=name,
        argv=trainer_command(run.root, run.rendezvous, trainer.num_ranks, start, host=host),
        env=trainer_env(
            trainer.num_threads or threads_per_rank(trainer.num_ranks),
            recorded.resolved.placement.rank_gpus,
            interface or trainer.interface,
        ),
        log_path=run.log_path(name),
        own_network=not recorded.config.shared_network and trainer.hosts == 1,
        is_done=run.trainer_step_path(recorded.config.num_steps).exists,
    )
