"""What HTTP costs: forward_backward and optim_step over `skylite service`, against the same verbs in process.

    python benchmarks/service_overhead.py --model smollm2-135m --rounds 5 --out FILE

Two processes hold the same model, and take turns: process, HTTP, HTTP, process. A round is one request with
8 sequences of 512 tokens and one update; the overhead is the median of the rounds' ratios, once of seconds,
and once of the CPU seconds of all processes, which other programs on the machine hardly change. The client is
Tinker's own (.venv/tinker, `make setup`). The service's engine is the fake one of the tests. A tiny model
shows the cost in milliseconds, which does not depend on the model.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from shared import SKYLITE, argument_parser, machine_info, set_flags

from skylite.processes.hardware import cpu_cores
from skylite.processes.torchrun import trainer_env
from skylite.run.files import write_json

SEQUENCES, TOKENS, RANK = 8, 512, 32
KEY = "tml-benchmark-0000000"
TINKER = Path(sys.prefix) / "tinker"
LAUNCHER = Path(__file__).resolve().parents[1] / "tests/fakes/launcher.py"


def texts() -> list[list[int]]:
    """Token ids below 250, different in every sequence."""
    return [[(7 * i + 13 * k + i * k) % 249 + 1 for i in range(TOKENS + 1)] for k in range(SEQUENCES)]


def in_process(model: str, _: str) -> Callable[[int], float]:
    """A round of `skylite.open_trainer`'s verbs, which returns the loss."""
    import skylite
    from skylite.verbs import Datum

    threads = {"trainer.num_threads": int(os.environ["OMP_NUM_THREADS"])}
    trainer = skylite.open_trainer(model, "in-process", rank=RANK, settings=threads)
    data = [Datum.of_text(ids) for ids in texts()]

    def step(sequences: int) -> float:
        loss = trainer.forward_backward(data[:sequences]).loss
        trainer.optim_step(learning_rate=1e-5)
        return loss

    return step


def over_http(model: str, url: str) -> Callable[[int], float]:
    """The same round of Tinker's client."""
    import tinker

    client = tinker.ServiceClient(base_url=url, api_key=KEY)
    trainer = client.create_lora_training_client(base_model=model, rank=RANK, seed=0).result()
    data = [
        tinker.Datum(
            model_input=tinker.ModelInput.from_ints(ids[:-1]),
            loss_fn_inputs={"target_tokens": ids[1:], "weights": [1.0] * TOKENS},
        )
        for ids in texts()
    ]

    def step(sequences: int) -> float:
        done = trainer.forward_backward(data[:sequences], "cross_entropy")
        update = trainer.optim_step(tinker.AdamParams(learning_rate=1e-5))
        update.result()
        return float(done.result().metrics["loss:sum"])

    return step


def child(side: str, model: str, url: str) -> None:
    """Do a round for each line of stdin, with so many sequences, and print its seconds and loss."""
    step = {"process": in_process, "http": over_http}[side](model, url)
    print("ready", flush=True)
    for line in sys.stdin:
        started = time.perf_counter()
        loss = step(int(line))
        print(json.dumps([time.perf_counter() - started, loss]), flush=True)


@contextmanager
def service(model: str, threads: int, folder: Path) -> Iterator[tuple[str, int]]:
    """The URL of a running service, and its process."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    flags = [
        "--model",
        model,
        "--port",
        str(port),
        "--out",
        "service",
        "--rank",
        str(RANK),
    ]
    settings = {
        "engine.launcher": f"{LAUNCHER}:FakeLauncher",
        "trainer.num_threads": threads,
    }
    flags += ["--max-length", "1024", *set_flags(settings)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(
            [*SKYLITE, "service", *flags],
            cwd=folder,
            env={**os.environ, "SKYLITE_API_KEY": KEY},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
    try:
        while "ready: " not in (folder / "log").read_text():
            if process.poll() is not None:
                raise SystemExit((folder / "log").read_text())
            time.sleep(0.2)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait()


def cpu_seconds(*pids: int) -> float:
    """Of these processes and all below them."""
    trees = [psutil.Process(pid) for pid in pids]
    every = [process for tree in trees for process in (tree, *tree.children(recursive=True))]
    return sum(sum(process.cpu_times()[:2]) for process in every)


def start(side: str, model: str, threads: int, url: str, folder: Path) -> subprocess.Popen[str]:
    env = {**os.environ, **trainer_env(threads), "PYTHONPATH": str(TINKER)}
    words = [
        sys.executable,
        str(Path(__file__).resolve()),
        "--side",
        side,
        "--model",
        model,
        "--url",
        url,
    ]
    process = subprocess.Popen(
        words,
        cwd=folder,
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "ready":
        if process.poll() is not None:
            raise SystemExit(f"the side {side} failed")
    return process


def ask(process: subprocess.Popen[str], sequences: int) -> tuple[float, float]:
    """Seconds and loss of one round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(f"{sequences}\n")
    process.stdin.flush()
    seconds, loss = json.loads(process.stdout.readline())
    return seconds, loss


def measure(model: str, rounds: int, threads: int) -> dict[str, Any]:
    with (
        tempfile.TemporaryDirectory() as name,
        service(model, threads, Path(name)) as (url, pid),
    ):
        sides = {side: start(side, model, threads, url, Path(name)) for side in ("process", "http")}
        pids = {"process": [sides["process"].pid], "http": [sides["http"].pid, pid]}
        losses = {side: [ask(process, 1)[1]] for side, process in sides.items()}  # warm-up
        seconds: dict[str, list[float]] = {side: [] for side in sides}
        cpu: dict[str, list[float]] = {side: [] for side in sides}
        try:
            for index in range(rounds):
                for side in sorted(sides, reverse=index % 2 == 0):
                    before = cpu_seconds(*pids[side])
                    found = ask(sides[side], SEQUENCES)
                    seconds[side].append(found[0])
                    cpu[side].append(cpu_seconds(*pids[side]) - before)
                    losses[side].append(found[1])
        finally:
            for process in sides.values():
                process.kill()
                process.wait()
    assert losses["http"] == losses["process"]
    return {
        "tokens": SEQUENCES * TOKENS,
        "threads": threads,
        "overhead": overhead(seconds),
        "cpu_overhead": overhead(cpu),
        "seconds": seconds,
        "cpu_seconds": cpu,
    }


def overhead(found: dict[str, list[float]]) -> dict[str, float]:
    """Medians over the rounds."""
    pairs = list(zip(found["http"], found["process"], strict=True))
    return {
        "seconds": statistics.median(http - alone for http, alone in pairs),
        "share": statistics.median(http / alone for http, alone in pairs) - 1,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=cpu_cores())
    parser.add_argument("--out", type=Path, default=Path("service_overhead.json"))
    parser.add_argument("--side", help="used by the script itself")
    parser.add_argument("--url", default="", help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.side:
        child(arguments.side, arguments.model, arguments.url)
        return
    found = measure(arguments.model, arguments.rounds, arguments.threads)
    write_json(arguments.out, found | machine_info())
    for name in ("overhead", "cpu_overhead"):
        print(f"{name}: {1000 * found[name]['seconds']:.0f} ms a round, {100 * found[name]['share']:.2f} %")


if __name__ == "__main__":
    main()
