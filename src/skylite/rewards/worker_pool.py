"""Runs reward functions in worker processes: they may be slow or hang, and must not block the event loop."""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import resource_tracker, util
from pathlib import Path
from typing import Any

from skylite.config.rollout import RewardParameters
from skylite.errors import ChildDied, RunFailed, convert_os_errors
from skylite.processes.private_folders import TemporaryFolder
from skylite.processes.reaper import die_with_parent
from skylite.processes.streams import printed_lines
from skylite.rewards import Component, load_components, score_components
from skylite.rewards.built_in import DEFAULTS
from skylite.rewards.call_rewards import Item
from skylite.types import Score
from skylite.untrusted_files import open_to_append

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_components: tuple[Component, ...] = ()
"""The reward functions of this worker process; empty in the parent."""


class RewardPool:
    """Worker processes with the reward functions.

    The parent handles signals that stop a run: a worker has a session of its own, so `timeout` and Ctrl-C do
    not reach it, and ignores SIGINT, SIGTERM and SIGHUP that are sent to it. It dies with the parent.
    """

    def __init__(
        self,
        specs: Sequence[str],
        weights: Sequence[float] | Mapping[str, float] = (),
        num_workers: int = 1,
        timeout_s: float = 600.0,
        programs: Mapping[str, str] | None = None,
        log_path: Path | None = None,
        parameters: RewardParameters = DEFAULTS,
        prefill: str = "",
    ) -> None:
        """Start the workers. Raises ConfigError if a reward cannot be loaded.

        `specs`, `weights`, `programs`, `parameters`: as for `load_components`. `timeout_s`: limit for one
        call of `score`. `log_path`: what the workers print is appended to it; None: they print to this
        process's streams. `prefill`: text before each completion that the functions get.
        """
        if log_path is not None:
            with convert_os_errors(log_path.parent):
                log_path.parent.mkdir(parents=True, exist_ok=True)
            log_path = log_path.absolute()
        # The workers load the functions too, and log what that prints.
        with contextlib.nullcontext() if log_path is None else printed_lines(lambda line: None):
            components = load_components(specs, weights, programs=programs, parameters=parameters)
        self._takes_several = any(c.function.takes_several for c in components)
        # Libraries that a reward imports obey files of the working folder, such as ./.env.
        self._folder = TemporaryFolder("rewards-")
        with _in_own_session():  # the executor would start it
            resource_tracker.ensure_running()
        context = multiprocessing.get_context("spawn")
        self._executor = ProcessPoolExecutor(
            num_workers,
            mp_context=context,
            initializer=_start_worker,
            initargs=(
                tuple(specs),
                weights,
                dict(programs or {}),
                parameters,
                os.getpid(),
                log_path,
                self._folder.path,
            ),
        )
        before = set(multiprocessing.active_children())
        # Workers start with the signals blocked, until they ignore them.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, STOP_SIGNALS)
        try:
            for _ in range(num_workers):
                self._executor.submit(os.getpid)
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._workers = set(multiprocessing.active_children()) - before
        self._watching: asyncio.AbstractEventLoop | None = None
        self._timeout_s = timeout_s
        self._prefill = prefill

    def watch(self, lost: Callable[[ChildDied], None]) -> None:
        """Until `close`, let the running event loop call `lost` as soon as a worker ends."""
        self._watching = asyncio.get_running_loop()
        for worker in self._workers:
            self._watching.add_reader(worker.sentinel, self._ended, worker.sentinel, lost)

    async def score(self, items: Sequence[Item]) -> list[Score]:
        """One score for each (prompt, completion text), in order.

        One worker gets all items if a function takes a batch or is async; otherwise they share the items.

        Raises RunFailed with the prompt's id if the reward function raises, returns no number or takes too
        long, and ChildDied if a worker ended. NaN and infinity are returned.
        """
        loop = asyncio.get_running_loop()
        items = [(prompt, self._prefill + completion) for prompt, completion in items]
        parts = [items] if self._takes_several else [[item] for item in items]
        try:
            futures = [loop.run_in_executor(self._executor, _score_here, part) for part in parts]
            async with asyncio.timeout(self._timeout_s):
                return [score for part in await asyncio.gather(*futures) for score in part]
        except BrokenProcessPool:
            raise _worker_lost() from None
        except TimeoutError:
            waiting = next(
                part[0][0].id
                for part, future in zip(parts, futures, strict=True)
                if not future.done() or future.cancelled()
            )
            pids = ", ".join(str(worker.pid) for worker in self._workers)
            raise RunFailed(
                f"Scoring took longer than {self._timeout_s:g} s (reward.timeout_s); "
                f"prompt {waiting} is not scored.",
                "Make the reward faster, raise reward.timeout_s, or check if a signal stopped its workers "
                f"(processes {pids}).",
            ) from None

    def close(self) -> None:
        """Kill the workers, even if they hang."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            if self._watching is not None:
                self._watching.remove_reader(worker.sentinel)
            if worker.is_alive() and worker.pid is not None:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(worker.pid, signal.SIGKILL)  # with the programs that a reward has started
            worker.kill()
            worker.join()
        self._folder.remove()

    def _ended(self, sentinel: int, lost: Callable[[ChildDied], None]) -> None:
        if self._watching is not None:
            self._watching.remove_reader(sentinel)  # it stays readable, so the callback would run again
        lost(_worker_lost())


@contextlib.contextmanager
def _in_own_session() -> Iterator[None]:
    """Let multiprocessing start its tracker in a session of its own.

    The tracker removes the pool's semaphores when this process is gone. So it must outlive a signal to the
    process group, such as that of a closed terminal or of `kill -9 -PGID`.
    """
    before = util.spawnv_passfds

    def spawn(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        for descriptor in passfds:
            os.set_inheritable(descriptor, True)  # multiprocessing closes it here at once
        return os.posix_spawn(path, list(args), os.environ, setsid=True)

    util.spawnv_passfds = spawn
    try:
        yield
    finally:
        util.spawnv_passfds = before


def _worker_lost() -> ChildDied:
    return ChildDied("A reward worker ended.", "It was killed or ran out of memory.")


def _start_worker(
    specs: Sequence[str],
    weights: Sequence[float] | Mapping[str, float],
    programs: Mapping[str, str],
    parameters: RewardParameters,
    parent: int,
    log_path: Path | None,
    folder: Path,
) -> None:
    global _components
    os.chdir(folder)
    _leave_signals_to_the_parent()
    die_with_parent(parent)
    if log_path is not None:
        is_null = log_path == Path(os.devnull)
        log = os.open(os.devnull, os.O_WRONLY) if is_null else open_to_append(log_path)
        os.dup2(log, 1)
        os.dup2(log, 2)
        sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]  # a worker ends by a kill
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # no print may fail
    _components = load_components(specs, weights, programs=programs, parameters=parameters)


def _leave_signals_to_the_parent() -> None:
    """Also in the programs that a reward starts, which would fail and so change the score.

    They may be terminated by the reward, though: a handler is gone after exec, unlike SIG_IGN.
    """
    os.setsid()
    for number in STOP_SIGNALS:
        signal.signal(number, lambda *_: None)
    os.register_at_fork(after_in_child=_restore_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)


def _restore_signals() -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_DFL)


def _score_here(items: Sequence[Item]) -> list[Score]:
    if not _components:
        raise RuntimeError("the worker was not started by _start_worker")
    return score_components(_components, items)
