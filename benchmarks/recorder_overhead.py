"""What does the OpenAI server of episodes cost? Conversations at once; the engine answers immediately.

    python benchmarks/recorder_overhead.py --out benchmarks/results/recorder_overhead_cpu.json

64 trajectories run at once, each with one HTTP connection of its own, in a second process. Printed for each
call: CPU milliseconds of the server's process ("recorder", its old name, so that results compare) and of the
sandbox that renders and tokenizes, CPU of the clients, and wall time. Starts are not counted. --profile
prints the server's functions by CPU time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import cProfile
import json
import os
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from command_line import argument_parser
from machine_info import machine_info
from train_phase import model_folder

from skylite.config.train import TrainConfig
from skylite.data.tokenizer import load_tokenizer
from skylite.environments.openai_server import OpenAIServer
from skylite.environments.parse_reply import tool_format
from skylite.environments.renderer import Renderer
from skylite.environments.scripted_engine import ScriptedEngine
from skylite.environments.trajectory_log import TrajectoryLog
from skylite.processes.process_tree import children
from skylite.run.files import write_json

TICK = os.sysconf("SC_CLK_TCK")
ANSWER = "I think that the number is 12, because it is in the middle of what is left."


def main() -> None:
    args = parse_arguments()
    if args.client:
        found = asyncio.run(visit(json.loads(sys.stdin.read())))
        print(json.dumps(found))
        return
    with profiled(args.profile):
        rounds = asyncio.run(measure(args))
    found = {name: round(statistics.median(r[name] for r in rounds), 3) for name in rounds[0]}
    print(json.dumps(found))
    if args.out:
        sizes = {name: getattr(args, name) for name in ("trajectories", "turns", "rounds", "model")}
        write_json(args.out, machine_info() | sizes | {"medians": found, "every_round": rounds})


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m or a model folder")
    parser.add_argument("--trajectories", type=int, default=64, help="at once")
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--client", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


async def measure(args: argparse.Namespace) -> list[dict[str, float]]:
    """The figures of each round, with one server for all."""
    model = Path(model_folder(args.model))
    with (
        tempfile.TemporaryDirectory(prefix="skylite-") as folder,
        contextlib.closing(load_tokenizer(model)) as tokenizer,
    ):
        stops, renderer = tokenizer.stop_token_ids, Renderer(tokenizer.run_jobs, model)
        server = await make_server(args, renderer, stops, Path(folder))
        engine = ScriptedEngine([await tokens(renderer)], stops[0])
        async with server.serving():
            await round_of(args, server, engine, 0)  # not counted
            return [await round_of(args, server, engine, n) for n in range(1, args.rounds + 1)]


async def make_server(
    args: argparse.Namespace, renderer: Renderer, stops: tuple[int, ...], folder: Path
) -> OpenAIServer:
    env = {"episode": "guess", "max_turns": args.turns, "max_tokens": 100_000}
    config = TrainConfig.model_validate({"env": env, "rollout": {"max_prompt_tokens": 50_000}})
    facts = await renderer.facts({})
    return OpenAIServer(
        config=config,
        renderer=renderer,
        stop_token_ids=stops,
        stops=facts.stops,
        tool_format=tool_format(facts.template),
        socket_path=folder / "openai.sock",
    )


async def tokens(renderer: Renderer) -> list[int]:
    """ANSWER in token ids: what the template adds between an answer and the end of its turn."""
    prompt = await renderer.prompt([{"role": "user", "content": ANSWER}], None, {})
    return prompt.ids[-len(ANSWER.split()) * 2 :]


async def round_of(
    args: argparse.Namespace, server: OpenAIServer, engine: ScriptedEngine, seed: int
) -> dict[str, float]:
    """One conversation in each trajectory, from a process of clients."""
    logs = [
        TrajectoryLog(name=f"p{n}", model="m", version=1, engine=engine, seed=seed, temperature=1.0)
        for n in range(args.trajectories)
    ]
    keys = [server.open(log) for log in logs]
    client = await asyncio.create_subprocess_exec(
        sys.executable, __file__, "--client", stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE
    )
    order = {"url": f"{server.base_url}/chat/completions", "keys": keys, "turns": args.turns}
    (pid,) = children(os.getpid()) - {client.pid}  # of the tokenizer's sandbox
    cpu, sandbox = time.process_time(), cpu_s(pid)
    output, _ = await client.communicate(json.dumps(order).encode())
    cpu, sandbox = time.process_time() - cpu, cpu_s(pid) - sandbox
    for key in keys:
        server.close(key)
    found, calls = json.loads(output), args.trajectories * args.turns
    assert sum(len(log.calls) for log in logs) == calls
    return {
        "recorder_cpu_ms": 1000 * cpu / calls,
        "sandbox_cpu_ms": 1000 * sandbox / calls,
        "recorder_and_sandbox_cpu_ms": 1000 * (cpu + sandbox) / calls,
        "client_cpu_ms": 1000 * found["cpu_s"] / calls,
        "wall_ms": 1000 * found["wall_s"] / calls,
        "latency_ms": found["latency_ms"],
    }


def cpu_s(pid: int) -> float:
    """CPU seconds of a process and of its children, ended or not."""
    while True:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="ascii").split()
        with contextlib.suppress(FileNotFoundError):  # one ended meanwhile
            return sum(_own_cpu_s(child) for child in [str(pid), *children])


def _own_cpu_s(pid: str) -> float:
    """CPU seconds of a process and of its children that have ended."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return sum(map(int, fields[11:15])) / TICK


async def visit(order: dict[str, Any]) -> dict[str, float]:
    """The clients: one conversation a key, all at once."""
    limits = httpx.Timeout(600)
    clients = [httpx.AsyncClient(timeout=limits, trust_env=False, verify=False) for _ in order["keys"]]
    latencies: list[float] = []
    started, cpu = time.perf_counter(), time.process_time()
    await asyncio.gather(
        *(
            converse(client, order["url"], key, order["turns"], latencies)
            for client, key in zip(clients, order["keys"], strict=True)
        )
    )
    return {
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time() - cpu,
        "latency_ms": 1000 * statistics.median(latencies),
    }


async def converse(client: httpx.AsyncClient, url: str, key: str, turns: int, latencies: list[float]) -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Guess my number from 1 to 24. Reply with a number. " * 4}
    ]
    for turn in range(turns):
        started = time.perf_counter()
        reply = await client.post(
            url, json={"messages": messages}, headers={"Authorization": f"Bearer {key}"}
        )
        latencies.append(time.perf_counter() - started)
        reply.raise_for_status()
        hint = {"role": "user", "content": f"It is higher, in turn {turn}. Guess again."}
        messages = [*messages, reply.json()["choices"][0]["message"], hint]


@contextlib.contextmanager
def profiled(wanted: bool) -> Iterator[None]:
    """Print the functions of this thread by their own CPU time."""
    profile = cProfile.Profile(time.thread_time)
    if wanted:
        profile.enable()
    yield
    if wanted:
        profile.disable()
        pstats.Stats(profile).sort_stats("tottime").print_stats(45)


if __name__ == "__main__":
    main()
