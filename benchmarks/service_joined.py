"""Two clients' requests as one batch, against one after the other: does `skylite service` lose time in turn?

    python benchmarks/service_joined.py --model smollm2-135m --rounds 5 --out FILE

A request is a forward_backward in sequences of 128 tokens; --tokens are those of both clients together. In
turn: each client's on its own policy. Joined: both in one pass of one policy, so that every product of the
base is made once. No batched form is faster: two policies' rows would need the products of two LoRA as well.
The two ways take turns; the ratio is the median of the rounds'. It is of CPU seconds on one thread, which
other programs on the machine hardly change. It also says whether a sequence's logprobs keep their bits.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from shared import argument_parser, machine_info, under_torchrun

from skylite.processes.torchrun import trainer_env
from skylite.run.files import write_json

LENGTH = 128
CLIENTS = ("first", "second")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--rounds", type=int, nargs="+", default=[5, 2], help="for each of --tokens")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--inner", action="store_true", help="used by the script itself")
    arguments = parser.parse_args()
    if arguments.inner:
        inner(arguments)
        return
    words = ["--inner", "--model", arguments.model, "--rounds", *map(str, arguments.rounds), "--tokens"]
    rows = under_torchrun(__file__, [*words, *map(str, arguments.tokens)], env=trainer_env(1))
    for row in rows:
        print(json.dumps({name: value for name, value in row.items() if name != "seconds"}))
    if arguments.out:
        write_json(arguments.out, machine_info() | {"rows": rows})


def inner(arguments: argparse.Namespace) -> None:
    """Print a row for each size as JSON."""
    import skylite

    settings = {"trainer.tokens_per_micro_batch": max(arguments.tokens), "trainer.num_threads": 1}
    with (
        TemporaryDirectory() as folder,
        skylite.open_trainer(arguments.model, folder, rank=32, settings=settings) as trainer,
    ):
        for number, name in enumerate(CLIENTS):
            trainer.policies.add(name, {}, number)
        measured(trainer, min(arguments.tokens), 1)  # a warm-up
        sizes = zip(arguments.tokens, arguments.rounds, strict=True)
        rows = [measured(trainer, tokens, rounds) for tokens, rounds in sizes]
    print(json.dumps(rows))


def measured(trainer: Any, tokens: int, rounds: int) -> dict[str, Any]:
    """Seconds of both ways, for this many tokens in all."""
    from skylite.verbs import Datum

    def request(client: int) -> list[dict[str, Any]]:
        texts = (
            [(7 * i + 13 * k + i * k + 101 * client) % 249 + 1 for i in range(LENGTH + 1)]
            for k in range(tokens // LENGTH // len(CLIENTS))
        )
        return [Datum.of_text(ids).checked("cross_entropy", 250).to_message() for ids in texts]

    def computed(policy: str, data: list[dict[str, Any]]) -> list[Any]:
        found = trainer.policies.forward_backward(policy, data, "cross_entropy", {}, True)
        return list(found["logprobs"])

    requests = [request(client) for client in range(len(CLIENTS))]
    ways = {
        "in turn": lambda: [computed(*pair) for pair in zip(CLIENTS, requests, strict=True)],
        "joined": lambda: [computed(CLIENTS[0], [x for own in requests for x in own])],
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    logprobs: dict[str, list[Any]] = {}
    for index in range(rounds):
        for way in sorted(ways, reverse=index % 2 == 0):
            started = time.process_time()
            found = ways[way]()
            seconds[way].append(time.process_time() - started)
            logprobs[way] = [x for part in found for x in part]
    pairs = list(zip(logprobs["in turn"], logprobs["joined"], strict=True))
    return {
        "tokens": tokens,
        "joined_over_in_turn": statistics.median(
            joined / turn for joined, turn in zip(seconds["joined"], seconds["in turn"], strict=True)
        ),
        "equal_bits": all(bool((mine == theirs).all()) for mine, theirs in pairs),
        "largest_difference": max(float(abs(mine - theirs).max()) for mine, theirs in pairs),
        "seconds": seconds,
    }


if __name__ == "__main__":
    main()
