"""What does sharing save in conversations? The train phase on trajectories of several turns: a tree, or rows.

    python benchmarks/turns.py --out benchmarks/results/turns_cpu.json
    python benchmarks/turns.py --model FOLDER --turns 2 6 12 --forms tree packed padded
    python benchmarks/turns.py --history rewritten --forms tree packed --out FILE

Each turn samples --sampled tokens and reads --observed ones, which no call samples. A call's prompt is all
of the conversation before it; with --history rewritten, later prompts lack the first half of every reply, as
with templates that drop reasoning, so each call branches off. The same random tokens in three forms:

    tree     skylite's: a trajectory's calls are one chain below the common prompt, or a comb if rewritten
    packed   one row a call without anything shared, packed end to end as peers do
    padded   one row a call, padded to the longest of its micro-batch

Every combination runs in its own process, so that peak memory belongs to it alone.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from command_line import argument_parser, under_torchrun
from machine_info import machine_info
from train_phase import model_folder, peak_gib, rss_gib

from skylite.processes.hardware import Device
from skylite.run.files import write_json

if TYPE_CHECKING:
    from skylite.config.train import Resolved, TrainConfig
    from skylite.model.policy import Policy
    from skylite.model.process_group import Dist
    from skylite.types import Group, Sample

FORMS = ("tree", "packed", "padded")
SIZES = ("history", "trajectories", "prompt", "sampled", "observed", "budget")


def main() -> None:
    args = parse_arguments()
    if args.inner:
        inner(args)
        return
    rows = json.loads(args.out.read_text())["rows"] if args.out and args.out.exists() else []
    for turns, form in itertools.product(args.turns, args.forms):
        if any((row["turns"], row["form"]) == (turns, form) for row in rows):
            continue
        rows.append({"turns": turns, "form": form, **in_own_process(args, turns, form)})
        print(json.dumps(rows[-1]), flush=True)
        if args.out:
            sizes = {n: getattr(args, n) for n in SIZES}
            ratios = [ratio(rows, t, f) for t in args.turns for f in args.forms if f != "tree"]
            write_json(
                args.out,
                machine_info()
                | {"counted_steps": args.steps - 1, "sizes": sizes, "rows": rows}
                | {"ratios": [r for r in ratios if r]},
            )


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="smollm2-135m", help="smollm2-135m or a model folder")
    parser.add_argument("--turns", nargs="+", type=int, default=[2, 6, 12])
    parser.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    parser.add_argument("--history", choices=("kept", "rewritten"), default="kept")
    parser.add_argument("--trajectories", type=int, default=4, help="of one group")
    parser.add_argument("--prompt", type=int, default=64)
    parser.add_argument("--sampled", type=int, default=24, help="tokens a turn")
    parser.add_argument("--observed", type=int, default=8, help="tokens a turn")
    parser.add_argument("--budget", type=int, default=2048, help="trainer.tokens_per_micro_batch")
    parser.add_argument("--rank", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3, help="the first is not counted")
    parser.add_argument("--vocab", type=int, default=20000, help="random token ids are below this")
    parser.add_argument("--out", type=Path, help="rows that it already holds are not measured again")
    parser.add_argument("--inner", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def in_own_process(args: argparse.Namespace, turns: int, form: str) -> dict[str, Any]:
    names = ("model", *SIZES, "rank", "steps", "vocab")
    words = ["--inner", f"--turns={turns}", f"--forms={form}", *(f"--{n}={getattr(args, n)}" for n in names)]
    found: dict[str, Any] = under_torchrun(__file__, words)
    return found


def ratio(rows: list[dict[str, Any]], turns: int, form: str) -> dict[str, Any]:
    """A form over the tree: tokens, seconds, and memory above the loaded model. Empty before both ran."""
    by_form = {row["form"]: row for row in rows if row["turns"] == turns}
    if form not in by_form or "tree" not in by_form:
        return {}
    tree, other = by_form["tree"], by_form[form]
    return {
        "turns": turns,
        "form": form,
        "tokens": round(other["tokens_computed"] / tree["tokens_computed"], 2),
        "seconds": round(other["seconds"] / tree["seconds"], 2),
        "peak_gib": round(other["peak_gib"] / tree["peak_gib"], 2),
        "gib_above_model": round(other["step_gib"] / tree["step_gib"], 2) if tree["step_gib"] else None,
    }


def inner(args: argparse.Namespace) -> None:
    """One combination; prints its numbers as JSON."""
    import torch

    from skylite.model.checked_shortcuts import enable_shortcuts
    from skylite.model.policy import load_policy
    from skylite.model.process_group import process_group, set_threads

    device: Device = "cuda" if torch.cuda.is_available() else "cpu"
    (form,) = args.forms
    set_threads(None)
    with process_group(device) as dist:
        config, where = settings(args, device)
        policy, _ = enable_shortcuts(load_policy(where, config, dist), list(range(20, 60)))
        if form == "padded":
            policy.model.get_base_model().set_attn_implementation("sdpa")
            policy = replace(policy, packing="padded")
        loaded = rss_gib("now")
        seconds, metrics = timed_steps(args, form, policy, config, dist)
        peak = peak_gib(policy.device)
    print(
        json.dumps(
            {
                "seconds": round(statistics.median(seconds), 3),
                "all_seconds": [round(s, 2) for s in seconds],
                "tokens_total": metrics["tokens/total"],
                "tokens_computed": metrics["tokens/unique"],
                "peak_gib": round(peak, 3),
                "step_gib": round(peak - loaded, 3),
            }
        )
    )


def settings(args: argparse.Namespace, device: Device) -> tuple[TrainConfig, Resolved]:
    from skylite.config.train import Resolved, TrainConfig

    config = TrainConfig.model_validate(
        {
            "num_steps": args.steps,
            "lora": {"rank": args.rank, "alpha": 32},
            "rollout": {"prompts_per_step": 1, "group_size": args.trajectories},
            "trainer": {"tokens_per_micro_batch": args.budget},
        }
    )
    return config, Resolved(
        model_path=model_folder(args.model),
        model_fingerprint="",
        dtype="float32",
        device=device,
        lora_sync_path="",
    )


def timed_steps(
    args: argparse.Namespace, form: str, policy: Policy, config: TrainConfig, dist: Dist
) -> tuple[list[float], dict[str, float]]:
    """Seconds of the steps after the first, and the last step's metrics."""
    from skylite.trainer.optimizer import make_optimizer
    from skylite.trainer.step import train_step

    optim, seconds = config.optim, []
    optimizer = make_optimizer("policy", policy.lora, optim.lr, optim.max_grad_norm, optim)
    for step in range(1, args.steps + 1):
        group = random_group(args, form, args.turns[0], step)
        started = time.perf_counter()
        metrics = train_step(policy, optimizer, [group], step, config, dist)
        seconds.append(time.perf_counter() - started)
    return seconds[1:], metrics


def random_group(args: argparse.Namespace, form: str, turns: int, seed: int) -> Group:
    """A group of random conversations. As rows, each call is a trajectory, with the conversation's reward."""
    from skylite.types import Group, Prompt, Trajectory

    rng = random.Random(seed)
    prompt = [rng.randrange(args.vocab) for _ in range(args.prompt)]
    conversations = [conversation(args, prompt, turns, rng) for _ in range(args.trajectories)]
    if form == "tree":
        found = [Trajectory(samples=tuple(c), reward=float(i == 0)) for i, c in enumerate(conversations)]
    else:
        rows = [(i == 0, call) for i, c in enumerate(conversations) for call in c]
        if form == "packed":  # another first token each, so that a tree finds nothing to share
            rows = [
                (best, replace(call, prompt_token_ids=[n, *call.prompt_token_ids[1:]]))
                for n, (best, call) in enumerate(rows)
            ]
        found = [Trajectory(samples=(call,), reward=float(best)) for best, call in rows]
    return Group(
        prompt=Prompt(id="random", messages=[], answer="", source="random"), trajectories=tuple(found)
    )


def conversation(args: argparse.Namespace, prompt: list[int], turns: int, rng: random.Random) -> list[Sample]:
    from skylite.types import Sample

    calls, history = [], prompt
    for _ in range(turns):
        sampled = [rng.randrange(args.vocab) for _ in range(args.sampled)]
        calls.append(
            Sample(
                prompt_token_ids=history,
                completion_token_ids=sampled,
                rollout_logprobs=[-10.0] * len(sampled),
            )
        )
        known = sampled[len(sampled) // 2 :] if args.history == "rewritten" else sampled
        history = [*history, *known, *(rng.randrange(args.vocab) for _ in range(args.observed))]
    return calls


if __name__ == "__main__":
    main()
