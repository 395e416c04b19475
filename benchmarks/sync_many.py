"""What does it cost to bring one adapter to several engines? By a shared folder, and by push.

    python benchmarks/sync_many.py --out FILE

Random adapters of rank 32 on all linear layers, in the shapes of SmolLM2-135M (float32) and of a 7B model (2
bytes a number). Shared folder: every engine reads the files, as a load does. Push: every engine has its
`skylite receive`, a process on this machine; all get the adapter at once, over the loopback interface. What
the engine does with the files then is the same for both, and not in it. Reports medians.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.numpy import save_file
from shared import SKYLITE, argument_parser, machine_info

from skylite.adapters.manifest import Canary, Manifest
from skylite.engine.connections import Address
from skylite.engine.pushed_adapters import ReceiverClient
from skylite.processes.file_tree import tree_bytes
from skylite.run.files import sha256_file, write_json
from skylite.run.run_dir import AdapterVersion, adapter_name

RANK, KEY = 32, "benchmark"
ENGINES = (1, 2, 4)
Started = tuple[Address, psutil.Process]
"""A receiver."""
SHAPES: dict[str, tuple[int, list[tuple[int, int]], str]] = {
    "SmolLM2-135M": (
        30,
        [(576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536)],
        "float32",
    ),
    "7B": (32, [(4096, 4096)] * 4 + [(11008, 4096), (11008, 4096), (4096, 11008)], "float16"),
}
"""Layers, [outputs, inputs] of the linear modules of each, and the type."""


def main() -> None:
    args = parse_arguments()
    found = {}
    with tempfile.TemporaryDirectory(prefix="skylite-", dir=args.folder) as folder:
        for number, name in enumerate(SHAPES):
            adapter = make_adapter(name, Path(folder), number)
            size = tree_bytes(adapter.path)
            with receivers(Path(folder), max(ENGINES)) as started:
                engines = [measure(args.repeats, adapter, started[:n]) for n in ENGINES]
            found[name] = {"bytes": size, "engines": engines}
    result = {"adapters": found} | machine_info()
    print(json.dumps(result, indent=1))
    if args.out:
        write_json(args.out, result)


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument(
        "--folder", type=Path, help="for the adapters and the receivers; default: the temporary folder"
    )
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


def make_adapter(shape: str, folder: Path, version: int) -> AdapterVersion:
    """A folder as a run publishes it, of random numbers."""
    layers, modules, dtype = SHAPES[shape]
    adapter = AdapterVersion(version, folder / adapter_name(version))
    adapter.path.mkdir()
    random, tensors = np.random.default_rng(version), {}
    for index in range(layers * len(modules)):
        outputs, inputs = modules[index % len(modules)]
        for letter, dimensions in (("A", (RANK, inputs)), ("B", (outputs, RANK))):
            values = random.standard_normal(dimensions, np.float32).astype(dtype)
            tensors[f"base_model.model.module{index}.lora_{letter}.weight"] = values
    save_file(tensors, adapter.weights_path)
    (adapter.path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": RANK}))
    manifest = Manifest(
        version=version,
        step=version,
        parent=None,
        weights_sha256=sha256_file(adapter.weights_path),
        weights_bytes=adapter.weights_path.stat().st_size,
        base_model=shape,
        base_fingerprint="",
        rank=RANK,
        alpha=RANK,
        dtype=dtype,
        target_modules=[],
        canary=Canary(sequences=[], policy_logprobs=[], base_logprobs=[]),
    )
    adapter.manifest_path.write_text(manifest.model_dump_json())
    return adapter


@contextlib.contextmanager
def receivers(folder: Path, count: int) -> Iterator[list[Started]]:
    """`skylite receive` processes, each with a folder of its own."""
    with contextlib.ExitStack() as stack:
        started = []
        for index in range(count):
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            words = ["receive", str(folder / f"engine-{index}"), "--port", str(port)]
            process = subprocess.Popen(
                [*SKYLITE, *words],
                env={**os.environ, "SKYLITE_API_KEY": KEY},
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.terminate)
            assert process.stderr is not None
            while "Ctrl-C ends it." not in (line := process.stderr.readline()):
                assert line, "it ended"
            started.append((Address(f"http://127.0.0.1:{port}", KEY), psutil.Process(process.pid)))
        yield started


def measure(repeats: int, adapter: AdapterVersion, started: list[Started]) -> dict[str, Any]:
    """Median seconds of both ways to as many engines as there are receivers."""

    def read_everywhere() -> None:
        threads = [threading.Thread(target=read, args=(adapter.path,)) for _ in started]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return {
        "engines": len(started),
        "shared_s": median([seconds(read_everywhere) for _ in range(repeats)]),
        **asyncio.run(push_everywhere(adapter, started, repeats)),
        "pushed_bytes": tree_bytes(adapter.path) * len(started),
    }


def seconds(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def median(values: list[float]) -> float:
    return round(statistics.median(values), 4)


def read(folder: Path) -> None:
    for path in folder.iterdir():
        path.read_bytes()


async def push_everywhere(adapter: AdapterVersion, started: list[Started], repeats: int) -> dict[str, float]:
    """Median seconds, and of the CPU: the sender's for all, and a receiver's. A run keeps clients, too."""
    clients = [ReceiverClient(f"engine-{index}", address) for index, (address, _) in enumerate(started)]
    walls, senders, receivers = [], [], []
    try:
        for _ in range(repeats):
            wall, sender, receiver = time.perf_counter(), time.process_time(), cpu_s(started)
            await asyncio.gather(*(client.push(adapter) for client in clients))
            walls.append(time.perf_counter() - wall)
            senders.append(time.process_time() - sender)
            receivers.append((cpu_s(started) - receiver) / len(started))
        return {
            "push_s": median(walls),
            "sender_cpu_s": median(senders),
            "receiver_cpu_s": median(receivers),
        }
    finally:
        for client in clients:
            await client.aclose()


def cpu_s(started: list[Started]) -> float:
    times = [process.cpu_times() for _, process in started]
    return sum(float(time.user + time.system) for time in times)


if __name__ == "__main__":
    main()
