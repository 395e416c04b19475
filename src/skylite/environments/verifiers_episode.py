"""`verifiers:NAME`: an episode that is one task of a verifiers environment.

verifiers runs the task, its tools and its scoring. Its evaluation client talks to our OpenAI server with the
trajectory's key: messages, rewards and metrics come from verifiers, tokens from that server. This module is
imported only in the process that runs episodes.
"""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from importlib import import_module
from typing import Any

from skylite.config.rollout import METRIC
from skylite.data.verifiers import COLUMN, cannot_open, open_config
from skylite.environments.chat import LIMIT_CODES, Chat, Task
from skylite.errors import ConfigError
from skylite.user_functions import UserCodeFailed, user_code

KEY_VARIABLE = "SKYLITE_API_KEY"
"""Where verifiers' client finds the trajectory's key. verifiers keeps names with API_KEY from programs."""


class VerifiersFailed(Exception):
    """The environment, or an agent's run in it, failed."""

    def __init__(self, message: str, code: str = "") -> None:
        super().__init__(message)
        self.code = code
        """The OpenAI server's, where a limit of the trajectory was the reason."""


def verifiers_episode(spec: str) -> Callable[[Task, Chat], Awaitable[dict[str, float]]]:
    """The episode of an environment, which is loaded once. Raises ConfigError."""
    config = open_config(spec)
    vf = import_module("verifiers.v1")
    import_module("skylite.environments.verifiers_harness").register()
    seat = _policy_seat(config, spec)
    try:
        with user_code():
            env = vf.load_environment(config.model_copy(update=_local_seats(config, vf)))
    except UserCodeFailed as error:
        raise cannot_open(spec, str(error)) from error
    _refuse_container(env, seat, spec)

    async def episode(task: Task, chat: Chat) -> dict[str, float]:
        os.environ[KEY_VARIABLE] = chat.api_key
        os.environ["NO_PROXY"] = os.environ["no_proxy"] = "127.0.0.1,localhost"
        client = vf.EvalClientConfig(base_url=chat.base_url, api_key_var=KEY_VARIABLE)
        own = _task(env.taskset, task)
        async with env.serving():
            found = await env.run_episode(own, vf.ModelContext(model=chat.model, client=client))
        return read_episode(found, seat)

    return episode


def _seats(config: Any) -> dict[str, Any]:
    """Agent's name -> its config."""
    seats: dict[str, Any] = import_module("verifiers.v1.configs.agent").agent_config_fields(config)
    return seats


def _policy_seat(config: Any, spec: str) -> str:
    """The one agent that the policy plays: it has no client of its own. Raises ConfigError."""
    seats = _seats(config)
    free = [name for name, seat in seats.items() if seat.client is None]
    if len(free) == 1:
        return free[0]
    if not free:
        raise ConfigError(f"{spec} gives each agent a client of its own.", "Leave out one, for the policy.")
    first = free[-1]
    raise ConfigError(
        f"{spec} has {len(free)} agents without a client of their own: {', '.join(free)}.",
        f"skylite trains one. Give the others a model, e.g. '{spec} {first}.client.type=eval "
        f"{first}.client.base_url=URL {first}.model=NAME'.",
    )


def _local_seats(config: Any, vf: Any) -> dict[str, Any]:
    """The seats on this machine, with the chat loop in this process where they have no program of their own.

    verifiers' defaults are a rented sandbox and a loop with a shell.
    """
    own_harness = import_module("verifiers.v1.configs.env").default_agent_harness(config.taskset.id)
    chat_loop = vf.harness_config_type("skylite_chat").model_validate({"id": "skylite_chat"})
    default = chat_loop if own_harness.id == "bash" else own_harness
    changed = {}
    for name, seat in _seats(config).items():
        harness = default if seat.harness is None else seat.harness
        update = {"harness": chat_loop if harness.id == "null" else harness, "retries": vf.RetryConfig()}
        if isinstance(seat.runtime, vf.PrimeConfig):
            update["runtime"] = vf.SubprocessConfig()
        changed[name] = seat.model_copy(update=update)
    return changed


def _refuse_container(env: Any, seat: str, spec: str) -> None:
    """Raise ConfigError if the tasks or the agent's program run in containers only."""
    config = _seats(env.config)[seat]
    needs = {
        "its tasks": type(env.taskset).task_type().NEEDS_CONTAINER,
        f"its program {config.harness.id}": import_module("verifiers.v1")
        .load_harness(config.harness)
        .NEEDS_CONTAINER,
    }
    if config.runtime.type == "subprocess" and any(needs.values()):
        what = " and ".join(name for name, is_needed in needs.items() if is_needed)
        raise ConfigError(
            f"{spec} needs a container for {what}; skylite runs it as a process on this machine.",
            f"Choose an environment without one, or give {seat}.runtime.type.",
        )


def _task(taskset: Any, task: Task) -> Any:
    """The row's task. Raises VerifiersFailed if the row has none that fits."""
    kind = type(taskset).task_type()
    if COLUMN not in task.columns:
        raise VerifiersFailed(f"the row has no task of verifiers (column {COLUMN})")
    return kind(kind.data_type().model_validate(task.columns[COLUMN]), taskset.config.task)


def read_episode(found: Any, seat: str) -> dict[str, float]:
    """The named rewards of the policy's run, with verifiers' weights, and its metrics as metric/NAME.

    Raises VerifiersFailed if the episode failed.
    """
    about = found.task.data.name or found.task.data.id or found.task.data.idx
    for record in (found, *found.traces):
        if not record.ok and record.last_error is not None:
            error = record.last_error
            code = next((code for code in LIMIT_CODES if f'"{code}"' in error.message), "")
            raise VerifiersFailed(f"task {about}: {error.type}: {error.message}", code)
    traces = [trace for trace in found.traces if trace.agent.name == seat]
    if len(traces) != 1:
        raise VerifiersFailed(
            f"task {about}: its agent {seat} ran {len(traces)} times; skylite trains one run"
        )
    (trace,) = traces
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        what = ", ".join(missing) or "any"
        raise VerifiersFailed(f"task {about}: it gave no reward ({what})")
    rewards = {name: reward.value for name, reward in trace.rewards.items()}
    metrics = {f"{METRIC}{name}": x for name, x in trace.metrics.items() if x is not None}
    return rewards | metrics
