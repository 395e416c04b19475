"""Everything that the page of `skylite report` shows, as JSON values with plain strings."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from safetensors import SafetensorError, deserialize

from skylite import __version__
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, DataError, ModelError
from skylite.evaluation.confidence_interval import score_name
from skylite.report.alarms import MIN_WINDOW, find_alarms
from skylite.report.completions import Completion, read_held_out, read_training
from skylite.report.read_run import HeldOut, RunFacts, number
from skylite.report.summary import summary
from skylite.run.run_dir import AdapterVersion, published_versions
from skylite.untrusted_files import read_bytes, read_text
from skylite.untrusted_text import parse_json, plain_lines

MAX_READ_STEPS = 60
"""Rollout files that are read for texts and repetition, at equal distances."""
MAX_VERSIONS = 8
"""Adapters whose layers are shown."""
MAX_TEXT = 20_000
"""Characters of a text; a longer one is cut and says so."""

T = TypeVar("T")
OnFile = Callable[[], None]
"""Called before each of `num_files` is read."""


def page_data(runs: Sequence[RunFacts], max_completions: int, on_file: OnFile) -> dict[str, Any]:
    """The data of a page about these runs."""
    labels = unique_names([facts.name for facts in runs])
    all_plots = dict.fromkeys(p for facts in runs for p in with_components(facts.metrics))
    plots = with_scores(all_plots, is_binary=not any(facts.has_partial_rewards for facts in runs))
    share = max(1, max_completions // len(runs))
    page: dict[str, Any] = plain_values(
        {
            "made": datetime.now(UTC).isoformat(timespec="seconds"),
            "version": __version__,
            "plots": [asdict(plot) for plot in plots],
            "runs": [
                run_data(facts, label, share, on_file) for facts, label in zip(runs, labels, strict=True)
            ],
        }
    )
    return page


def run_data(facts: RunFacts, label: str, max_completions: int, on_file: OnFile) -> dict[str, Any]:
    """One run: facts, metrics by column, findings, adapters by layer, settings and completions."""
    unreadable = list(facts.unreadable)
    completions, repetition = read_completions(facts, unreadable, on_file)
    metrics = metric_columns(facts, repetition)
    config = facts.run.config
    resolved = facts.run.run_config.resolved
    shown = share_out(completions, max_completions)
    head = {k: v for k, v in summary(facts).items() if k not in ("path", "alarms", "unreadable")}
    return {
        **head,
        "label": label,
        "alarms": [
            {"kind": a.kind, "is_alarm": a.is_alarm, "since": a.since, "text": a.text}
            for a in find_alarms(facts.metrics, facts.held_out, repetition)
        ],
        "is_judged": len(facts.metrics) >= 2 * MIN_WINDOW,
        "has_partial_rewards": facts.has_partial_rewards,
        "metrics": metrics,
        "held_out": [{"version": h.version, "label": h.label, **asdict(h.score)} for h in facts.held_out],
        "time": time_split(facts.metrics),
        "adapters": adapter_data(facts, unreadable, on_file),
        "settings": flat(config.model_dump(mode="json")),
        "defaults": flat(TrainConfig(num_steps=config.num_steps).model_dump(mode="json")),
        "machine": machine_data(facts, unreadable),
        "choices": [*map(str, resolved.notes), *resolved.choices],
        "skylite_version": facts.run.run_config.skylite_version,
        "num_completions": sum(map(len, completions)),
        "completions": [_completion(c) for part in shown for c in part],
        "unreadable": unreadable,
    }


def num_files(facts: RunFacts) -> int:
    """How many files of completions and adapters `page_data` reads."""
    return len(_rollout_files(facts)) + len(_evaluations(facts)) + len(_adapters(facts))


def _rollout_files(facts: RunFacts) -> list[tuple[int, Path]]:
    return spread(list(facts.files.stored_rollouts().items()), MAX_READ_STEPS)


def _evaluations(facts: RunFacts) -> list[HeldOut]:
    return [h for h in spread(facts.held_out, MAX_READ_STEPS) if h.path.is_file()]


def _adapters(facts: RunFacts) -> list[AdapterVersion]:
    # Version 0 is zero.
    trained = [v for v in published_versions(facts.run.lora_sync_path) if v.version > 0]
    return spread(trained, MAX_VERSIONS)


def read_completions(
    facts: RunFacts, unreadable: list[str], on_file: OnFile = lambda: None
) -> tuple[list[list[Completion]], dict[int, float]]:
    """Completions of each read rollout file and evaluation, and the mean repetition of each read step."""
    found: list[list[Completion]] = []
    repetition: dict[int, float] = {}
    for step, path in _rollout_files(facts):
        on_file()
        try:
            completions = read_training(path, step)
        except DataError as error:
            unreadable.append(error.what)
            continue
        if completions:
            found.append(completions)
            repetition[step] = math.fsum(c.repetition for c in completions) / len(completions)
    for held_out in _evaluations(facts):
        on_file()
        try:
            found.append(read_held_out(held_out.path, held_out.version))
        except DataError as error:
            unreadable.append(error.what)
    return found, repetition


def spread(items: Sequence[T], count: int) -> list[T]:
    """At most `count` items at equal distances, the first and the last included."""
    if len(items) <= count:
        return list(items)
    return [items[round(k * (len(items) - 1) / (count - 1))] for k in range(count)]


def share_out(parts: Sequence[Sequence[Completion]], total: int) -> list[Sequence[Completion]]:
    """The first completions of each part, so that all parts together have at most `total`.

    Short parts leave their share to longer ones. A part's first prompts are the same in every evaluation.
    """
    kept = [0] * len(parts)
    left = total
    while left > 0 and (open_parts := [k for k, part in enumerate(parts) if kept[k] < len(part)]):
        share = max(1, left // len(open_parts))
        for k in open_parts:
            take = min(share, len(parts[k]) - kept[k], left)
            kept[k] += take
            left -= take
    return [part[:n] for part, n in zip(parts, kept, strict=True)]


def metric_columns(facts: RunFacts, repetition: Mapping[int, float]) -> dict[str, list[Any]]:
    """Each numeric metric as a column beside `step`, and the repetition."""
    steps = [int(m["step"]) for m in facts.metrics]
    names = dict.fromkeys(name for m in facts.metrics for name in m if name != "step")
    columns = {name: facts.series(name) for name in names}
    columns = {name: values for name, values in columns.items() if any(map(math.isfinite, values))}
    if repetition:
        columns[REPETITION] = [repetition.get(step, math.nan) for step in steps]
    return {"step": steps, **columns}


def adapter_data(facts: RunFacts, unreadable: list[str], on_file: OnFile) -> dict[str, Any]:
    """Norm and effective rank by version, layer and module."""
    updates = {}
    for version in _adapters(facts):
        on_file()
        try:
            updates[version.version] = layer_updates(version.path)
        except ModelError as error:
            unreadable.append(error.what)
    return {
        "versions": list(updates),
        "updates": [[[u.layer, u.module, u.norm, u.effective_rank] for u in updates[v]] for v in updates],
    }


def machine_data(facts: RunFacts, unreadable: list[str]) -> dict[str, Any]:
    """machine.json flattened; empty for a run that did not record it."""
    path = facts.files.machine_path
    if path.is_symlink():  # of a stranger's run, to a file of yours: the page may be sent on
        unreadable.append(f"{path} is a link, and is not shown.")
        return {}
    if not path.is_file():
        return {}
    try:
        return flat(facts.files.read_json(path))
    except ConfigError as error:
        unreadable.append(error.what)
        return {}


def flat(tree: Mapping[str, Any], start: str = "") -> dict[str, Any]:
    """Nested tables as `section.key`."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        name = f"{start}{key}"
        found |= flat(value, f"{name}.") if isinstance(value, dict) and value else {name: value}
    return found


def unique_names(names: Sequence[str]) -> list[str]:
    """The names, numbered where several are equal."""
    return [
        name if names.count(name) == 1 else f"{name} ({names[: k + 1].count(name)})"
        for k, name in enumerate(names)
    ]


def plain_values(value: Any) -> Any:
    """JSON values with plain strings (untrusted_text.py) and null for numbers that JSON lacks."""
    if isinstance(value, str):
        return plain_lines(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {plain_lines(str(k)): plain_values(v) for k, v in value.items()}
    if isinstance(value, Iterable):
        return [plain_values(v) for v in value]
    return value


def _completion(c: Completion) -> dict[str, Any]:
    return {
        "source": c.source,
        "step": c.step,
        "prompt": c.prompt_id,
        "question": _cut(c.question),
        "answer": _cut(c.answer),
        "turns": [_cut(turn) for turn in c.turns],
        "observed": [_cut(told) for told in c.observed],
        "turn_rewards": list(c.turn_rewards),
        "end": c.end,
        "reward": c.reward,
        "components": dict(c.components),
        "tokens": c.tokens,
        "truncated": c.is_truncated,
    }


def _cut(text: str) -> str:
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]} [{len(text) - MAX_TEXT} characters cut]"


@dataclass(frozen=True, slots=True, kw_only=True)
class Plot:
    """Curves in one picture."""

    title: str
    keys: tuple[str, ...]
    """Metrics; the first is the main curve."""
    help: str
    """What is good and what is bad, in a sentence."""
    unit: str = ""
    percent: bool = False
    log: bool = False
    noisy: bool = True
    """Whether smoothing helps."""
    needs_binary: bool = False
    """In percent and called right only where the first reward function returns 0 or 1."""
    divisor: int = 1
    """Converts the metric to `unit`."""


HELD_OUT = "held-out"
REPETITION = "repetition"
PLOTS = (
    Plot(title="Reward", keys=("reward/mean",), help="Should rise, with noise from step to step."),
    Plot(
        title="Held-out accuracy",
        keys=(HELD_OUT,),
        help="Should rise with the reward. The band is the 95 % interval.",
        percent=True,
        needs_binary=True,
    ),
    Plot(
        title="Right completions",
        keys=("reward/right_frac",),
        help="Completions of training whose first reward function returns 1.",
        percent=True,
        needs_binary=True,
    ),
    Plot(
        title="KL to the reference",
        keys=("policy/kl_ref",),
        help="Rises slowly. Measured only with algorithm.kl_coef above 0.",
        unit="nats",
    ),
    Plot(
        title="Entropy",
        keys=("policy/entropy",),
        help="Falls slowly. Near 0 with a low reward: the policy collapsed. Rises while the reward falls: "
        "it becomes random.",
        unit="nats",
    ),
    Plot(
        title="Groups without signal",
        keys=("groups/zero_std_sampled_frac",),
        help="Groups whose rewards are all equal. Near 100 %, nothing is learned.",
        percent=True,
    ),
    Plot(
        title="Completion length",
        keys=("completion/tokens_mean",),
        help="Steady, or moves with the reward.",
        unit="tokens",
    ),
    Plot(
        title="Truncated completions",
        keys=("completion/truncated_frac",),
        help="Near 0. Else raise rollout.max_completion_tokens.",
        percent=True,
    ),
    Plot(
        title="Repetition",
        keys=(REPETITION,),
        help="Share of 4-grams of tokens that a completion repeats. A rise is a sign of degeneration.",
        percent=True,
    ),
    Plot(
        title="Trainer against engine",
        keys=("mismatch/logprob_diff_mean", "mismatch/logprob_diff_max"),
        help="Mean and largest difference of log-probabilities. Should not grow.",
        unit="nats",
        log=True,
    ),
    Plot(
        title="Canary gap",
        keys=("canary/gap_max", "canary/gap_mean"),
        help="After each sync, on fixed sequences. Over the tolerance the run stops.",
        unit="nats",
        log=True,
    ),
    Plot(
        title="Effective sample size",
        keys=("mismatch/ess_frac",),
        help="Near 100 %. Low: few tokens carry the update.",
        percent=True,
    ),
    Plot(
        title="Gradient norm",
        keys=("optim/grad_norm",),
        help="Steady. Jumps by orders of magnitude: lower optim.lr.",
    ),
    Plot(
        title="Clipped tokens",
        keys=("policy/clipped_frac",),
        help="0 with one update per step, small with several.",
        percent=True,
    ),
    Plot(
        title="Adapter norm",
        keys=("adapter/b_norm",),
        help="Frobenius norm of all LoRA B matrices: how far the policy moved from its start.",
        noisy=False,
    ),
    Plot(
        title="Sampling speed",
        keys=("perf/completion_tokens_per_s",),
        help="Completion tokens per second of all engines.",
        unit="tokens per second",
    ),
    Plot(
        title="Memory",
        keys=("mem/rss_peak_bytes",),
        help="Largest memory of a trainer rank so far, without that of a GPU.",
        unit="GiB",
        divisor=2**30,
        noisy=False,
    ),
    Plot(
        title="GPU memory",
        keys=("mem/gpu_peak_bytes",),
        help="Largest memory of a trainer rank's tensors on its GPU so far, without the engine's.",
        unit="GiB",
        divisor=2**30,
        noisy=False,
    ),
    Plot(title="Learning rate", keys=("optim/lr",), help="Of each step.", noisy=False),
)


def with_scores(plots: Iterable[Plot], *, is_binary: bool) -> tuple[Plot, ...]:
    """The plots of a run whose first reward function returns other scores than 0 and 1."""
    if is_binary:
        return tuple(plots)
    title = f"Held-out {score_name(is_binary=False)}"
    return tuple(
        replace(plot, title=title, percent=False) if plot.keys == (HELD_OUT,) else plot
        for plot in plots
        if plot.keys == (HELD_OUT,) or not plot.needs_binary
    )


def component_plot(metrics: Iterable[Mapping[str, Any]], known: frozenset[str]) -> Plot | None:
    """The reward functions of a run with several: `reward/NAME`."""
    names = {k: None for m in metrics for k in m if k.startswith("reward/") and k not in known}
    if not names:
        return None
    return Plot(title="Reward functions", keys=tuple(names), help="Mean unweighted score of each.")


def with_components(metrics: Iterable[Mapping[str, Any]]) -> tuple[Plot, ...]:
    """PLOTS, and after the first the reward functions if there are several."""
    known = frozenset({"reward/mean", "reward/std", "reward/right_frac", "reward/penalty_mean",
                       "reward/partial_frac", "reward/tokens_corr", "reward/sampled_mean"})  # fmt: skip
    extra = component_plot(metrics, known)
    return PLOTS if extra is None else (PLOTS[0], extra, *PLOTS[1:])


TIMES = {
    "sampling": "time/rollout_s",
    "training": "time/train_s",
    "sync": "time/sync_s",
    "checkpoints": "time/checkpoint_s",
}


def time_split(metrics: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds of all steps by part. What overlaps is scaled so that the parts sum to the steps."""
    parts, total = dict.fromkeys(TIMES, 0.0), 0.0
    for m in metrics:
        step = number(m, "time/step_s")
        if not math.isfinite(step):
            continue
        total += step
        for name, key in TIMES.items():
            seconds = number(m, key)
            parts[name] += seconds if math.isfinite(seconds) else 0.0
    known = sum(parts.values())
    if known > total > 0:  # sampling ahead: two parts run at once
        return {name: seconds * total / known for name, seconds in parts.items()}
    return {**parts, "other": total - known}


FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
LAYER_NUMBER = re.compile(r"\.(\d+)\.")
DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUpdate:
    """The update alpha / r * B A of one module."""

    layer: int
    """-1 for a module outside of the numbered layers."""
    module: str
    """Last part of its name, such as q_proj."""
    norm: float
    """Frobenius norm."""
    effective_rank: float
    """exp of the entropy of the normalised singular values (Roy & Vetterli 2007); nan for a zero update."""


def layer_updates(adapter: Path) -> list[ModuleUpdate]:
    """The updates of an adapter folder, by layer. Raises ModelError."""
    factors: dict[str, dict[str, Matrix]] = {}
    for name, tensor in _tensors(adapter / "adapter_model.safetensors"):
        if match := FACTOR.fullmatch(name):
            factors.setdefault(match.group(1), {})[match.group(2)] = tensor
    config = _config(adapter / "adapter_config.json")
    updates = [
        _update(name, pair, config)
        for name, pair in factors.items()
        if len(pair) == 2 and pair["A"].ndim == pair["B"].ndim == 2 and len(pair["A"]) == pair["B"].shape[1]
    ]
    return sorted(updates, key=lambda u: (u.layer, u.module))


def singular_values(a: Matrix, b: Matrix) -> Matrix:
    """The singular values of b @ a, largest first, from r x r matrices: the eigenvalues of (b'b)(aa').

    Values under 1e-8 of the largest are lost in rounding, and do not matter here. einsum, because the threads
    of BLAS make products of this size twenty times slower while a run uses the cores.
    """
    weights, vectors = np.linalg.eigh(np.einsum("oi,oj->ij", b, b))
    root = (vectors * np.sqrt(np.maximum(weights, 0.0))) @ vectors.T
    squares = np.linalg.eigvalsh(root @ np.einsum("ik,jk->ij", a, a) @ root)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0))[::-1])


def effective_rank(values: Matrix) -> float:
    """exp(-sum p log p) with p = values / sum(values); nan if all are 0."""
    total = float(values.sum())
    if not total > 0:
        return math.nan
    p = values[values > 0] / total
    return float(np.exp(-(p * np.log(p)).sum()))


def _update(name: str, pair: Mapping[str, Matrix], config: Mapping[str, Any]) -> ModuleUpdate:
    rank = len(pair["A"])
    alpha = config.get("lora_alpha", rank)
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    values = singular_values(pair["A"], pair["B"]) * (float(alpha) / divisor)
    layer = LAYER_NUMBER.search(f".{name}.")
    return ModuleUpdate(
        layer=int(layer.group(1)) if layer else -1,
        module=name.rpartition(".")[2],
        norm=float(np.sqrt((values**2).sum())),
        effective_rank=effective_rank(values),
    )


def _tensors(path: Path) -> list[tuple[str, Matrix]]:
    try:
        tensors = deserialize(read_bytes(path))  # type: ignore[no-untyped-call]
        return [(name, _array(spec)) for name, spec in tensors]
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}.", "Run `skylite adapters verify` on the run."
        ) from None


def _array(spec: Mapping[str, Any]) -> Matrix:
    """A tensor as float64. numpy has no bfloat16, which is the upper half of a float32."""
    if spec["dtype"] == "BF16":
        wide = np.frombuffer(spec["data"], np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64).reshape(spec["shape"])
    if spec["dtype"] not in DTYPES:
        raise ValueError(f"a tensor has dtype {spec['dtype']}")
    return np.frombuffer(spec["data"], DTYPES[spec["dtype"]]).astype(np.float64).reshape(spec["shape"])


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = parse_json(read_text(path))
        if not isinstance(config, dict) or not isinstance(config.get("lora_alpha", 1.0), int | float):
            raise ValueError("lora_alpha is not a number")
        return config
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The adapter is damaged.") from None
