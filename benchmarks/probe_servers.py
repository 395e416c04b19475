"""What `skylite probe` finds on stock vLLM servers that serve an adapter rightly, wrongly or not at all.

    python benchmarks/probe_servers.py --run RUN --out benchmarks/results/probe_servers_cpu.json

RUN: a finished run of `make lora-gsm8k`, which keeps its last versions. For each dtype vLLM's own
`api_server` serves the base, without anything of skylite. Adapters are loaded as peers' trainers do: each
version under its own name, or in place under one name (`load_inplace`). Each case runs `skylite probe`. The
file has its verdict, exit code and seconds, and whether the verdict is the right one.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from safetensors.torch import load_file, save_file
from shared import SKYLITE, argument_parser, machine_info

from skylite.config.loading import read_run_config
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir, published_versions

BASE, ONE_NAME = "base", "policy"
KEPT = ("verdict", "moved", "gap", "unexplained", "noise", "base_gap", "same_errors")
START_S = 300.0
ENV = {"VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}


@dataclass(frozen=True, slots=True)
class Case:
    """What a server does, and the verdict that is right."""

    name: str
    prepare: Callable[[], None]
    adapter: str
    """Its name on the server."""
    verdict: str
    """How it begins, as a regular expression."""
    base: Path | None = None
    """The base that the probe is told. None: the true one."""


@dataclass(frozen=True, slots=True)
class Server:
    url: str
    http: httpx.Client

    def load(self, name: str, path: Path, in_place: bool = False) -> None:
        body = {"lora_name": name, "lora_path": str(path), "load_inplace": in_place}
        self.http.post("/v1/load_lora_adapter", json=body).raise_for_status()

    def unload(self, name: str) -> None:
        self.http.post("/v1/unload_lora_adapter", json={"lora_name": name}).raise_for_status()


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--run", type=Path, required=True)
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    run = RunDir(args.run.resolve())
    model = read_run_config(run.config_path).resolved.model.path
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for dtype in args.dtypes:
            with serving(model, dtype, Path(folder, f"{dtype}.log")) as server:
                for case in cases(server, run, model, Path(folder, dtype)):
                    found.append({"dtype": dtype, **outcome(case, server, run, model)})
                    print(json.dumps(found[-1]), flush=True)
    write_json(args.out, machine_info() | {"cases": found})


@contextmanager
def serving(model: Path, dtype: str, log: Path) -> Iterator[Server]:
    """vLLM's own server of the base."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
    command += ["--dtype", dtype, "--host", "127.0.0.1", "--port", str(port), "--served-model-name", BASE]
    command += ["--enable-lora", "--max-lora-rank", "32", "--max-loras", "2", "--max-model-len", "2048"]
    command.append("--enforce-eager")
    with log.open("wb") as out:
        process = subprocess.Popen(command, env=os.environ | ENV, stdout=out, stderr=out)
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, timeout=120) as http:
            deadline = time.monotonic() + START_S
            while not answers(http):
                if process.poll() is not None or time.monotonic() > deadline:
                    raise SystemExit(log.read_text(encoding="utf-8", errors="replace")[-3000:])
                time.sleep(0.5)
            yield Server(url, http)
    finally:
        process.terminate()
        process.wait()


def answers(http: httpx.Client) -> bool:
    try:
        return http.get("/health").is_success
    except httpx.HTTPError:
        return False


def cases(server: Server, run: RunDir, model: Path, folder: Path) -> Iterator[Case]:
    """Each is prepared when its turn comes; adapters that are not needed any more are unloaded."""
    start, *_, older, newest = published_versions(run.default_adapters)
    folder.mkdir()

    def loaded(name: str, path: Path) -> Callable[[], None]:
        return lambda: server.load(name, path)

    def reloaded() -> None:
        server.load(ONE_NAME, newest.path, in_place=True)

    right = f"policy-v{newest.version:06d}"
    yield Case("versioned name", loaded(right, newest.path), right, "applied")
    yield Case("the base's own name", lambda: None, BASE, "not applied")
    server.unload(right)
    yield Case("one name, one version old", loaded(ONE_NAME, older.path), ONE_NAME, "another adapter")
    yield Case("one name, reloaded in place", reloaded, ONE_NAME, "applied")
    server.unload(ONE_NAME)
    yield Case("adapter without effect", loaded("start", start.path), "start", "not applied")
    server.unload("start")
    for kind in ("q_proj", "v_proj", "down_proj"):
        part = changed(newest.path, folder / kind, dropped=kind)
        yield Case(f"without {kind}", loaded(kind, part), kind, f"applied in part: {kind} ")
        server.unload(kind)
    half = changed(newest.path, folder / "half", alpha=0.5)
    yield Case("half of alpha", loaded("half", half), "half", r"applied 0\.[45]\d times")
    server.unload("half")
    other = other_base(model, folder / "other")
    yield Case("another base", loaded(right, newest.path), right, "another base", base=other)


def changed(adapter: Path, folder: Path, dropped: str = "", alpha: float = 1.0) -> Path:
    """A copy without the LoRA of one kind of module, or with another alpha."""
    shutil.copytree(adapter, folder)
    weights = folder / "adapter_model.safetensors"
    tensors = load_file(weights)
    zeroed = {n: t * 0 if dropped and f".{dropped}.lora_B" in n else t for n, t in tensors.items()}
    weights.unlink()  # a version's files may be links to others'
    save_file(zeroed, weights)
    config = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
    config["lora_alpha"] *= alpha
    (folder / "adapter_config.json").unlink()
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def other_base(model: Path, folder: Path) -> Path:
    """A copy whose last MLP is 5 % larger."""
    shutil.copytree(model, folder)
    for path in folder.glob("*.safetensors"):
        tensors = load_file(path)
        last = max((n for n in tensors if "down_proj" in n), key=lambda n: int(n.split(".")[2]), default="")
        path.unlink()
        save_file({n: t * 1.05 if n == last else t for n, t in tensors.items()}, path, {"format": "pt"})
    return folder


def outcome(case: Case, server: Server, run: RunDir, model: Path) -> dict[str, Any]:
    case.prepare()
    words = ["probe", server.url, "--adapter", str(run.root), "--base", str(case.base or model)]
    started = time.monotonic()
    done = subprocess.run(
        [*SKYLITE, *words, "--name", case.adapter, "--json"], stdout=subprocess.PIPE, text=True, check=False
    )
    seconds = round(time.monotonic() - started, 1)
    report = json.loads(done.stdout)
    found = {key: report[key] for key in KEPT}
    is_right = bool(re.match(case.verdict, report["verdict"])) and done.returncode == int(
        case.verdict != "applied"
    )
    return {"case": case.name, "is_right": is_right, "exit_code": done.returncode, "seconds": seconds} | found


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    main()
