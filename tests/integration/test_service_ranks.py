"""The trainer of a service under torchrun: two ranks do what one does, refuse in step, end with the front."""

from __future__ import annotations

import os
import socket
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skylite.processes.frames import receive_frame, send_frame
from skylite.processes.torchrun import torchrun_command, trainer_env
from tests.integration.torchrun import TIMEOUT_S
from tests.small_run import make_run, settings
from tests.unit.service_cases import data_messages


def carried_out(root: Path, model: Path, num_ranks: int, commands: list[dict[str, Any]]) -> list[Any]:
    """The replies of a trainer to these commands."""
    config = settings(trainer={"tokens_per_micro_batch": 24, "num_ranks": num_ranks})
    run = make_run(root / "run", model, config, {})
    run.rendezvous.mkdir()
    front = socket.socket(socket.AF_UNIX)
    front.bind(str(root / "s"))
    front.listen()
    front.settimeout(TIMEOUT_S)
    words = [str(run.root), str(root / "s")]
    process = subprocess.Popen(
        torchrun_command(run.rendezvous, num_ranks, "skylite.trainer.service_worker", words),
        env={**os.environ, **trainer_env(1)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        stream, _ = front.accept()
        stream.settimeout(TIMEOUT_S)
        hello = receive_frame(stream)
        assert hello is not None
        assert hello["ready"]
        replies = []
        for command in commands:
            send_frame(stream, command)
            replies.append(receive_frame(stream))
        stream.close()
        assert process.wait(60) == 0
        return replies
    finally:
        process.kill()
        out = process.communicate()[0]
        print(out[-4000:])


def test_two_ranks_do_what_one_does(tiny_llama: Path, tmp_path: Path):
    data = data_messages()
    both = {"data": data, "settings": {}, "backward": True}
    ppo = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
    commands: list[dict[str, Any]] = [
        {"verb": "add", "policy": "a", "lora": {"rank": 3}, "seed": 5},
        {"verb": "add", "policy": "b", "lora": {"target_modules": ["q_proj"]}, "seed": 6},
        {"verb": "forward_backward", "policy": "a", "loss": "ppo", **both, "settings": ppo},
        {"verb": "forward_backward", "policy": "b", "loss": "dro", **both, "settings": {"beta": 0.1}},
        {"verb": "optim_step", "policy": "a", "params": {"learning_rate": 0.01, "eps": 1e-6}},
        {"verb": "optim_step", "policy": "nobody", "params": {}},
        {"verb": "save", "policy": "a", "path": "FOLDER/state/step-000000"},
        {"verb": "save", "policy": "a", "path": "/proc/nothing/step-000000"},
        {"verb": "load", "policy": "b", "path": "FOLDER/state/step-000000", "optimizer": True},
        {"verb": "forward_backward", "policy": "a", "loss": "ppo", **both, "settings": ppo},
        {"verb": "publish", "policy": "a", "version": 1},
        {"verb": "optim_step", "policy": "b", "params": {"learning_rate": 0.01, "eps": 1e-6}},
        {"verb": "remove", "policy": "a"},
        {"verb": "optim_step", "policy": "a", "params": {}},
    ]
    found = []
    for ranks in (1, 2):
        root = tmp_path / str(ranks)
        root.mkdir()
        named = [
            {k: v.replace("FOLDER", str(root)) if k == "path" else v for k, v in c.items()} for c in commands
        ]
        found.append(carried_out(root, tiny_llama, ranks, named))
    refused = {5: "no policy 'nobody'", 7: "nothing", 8: "other shapes", 13: "no policy 'a'"}
    for index, (one, two) in enumerate(zip(*found, strict=True)):
        assert one.keys() == two.keys(), (index, one, two)
        if index in refused:
            assert refused[index] in two["refused"]
            continue
        if commands[index]["verb"] == "forward_backward":
            assert two["done"]["loss"] == pytest.approx(one["done"]["loss"], rel=1e-5)
            pairs = zip(one["done"]["logprobs"], two["done"]["logprobs"], strict=True)
            assert all(np.allclose(mine, theirs, atol=1e-5) for mine, theirs in pairs)
        elif commands[index]["verb"] == "optim_step":
            assert two["done"] == pytest.approx(one["done"], rel=1e-4)
        else:
            assert two["done"] is one["done"] is None
