"""Train a tiny random model of every family of transformers, and write skylite/hub/families.json.

    python -m tests.model_sweep                  all families, or what an interrupted sweep left
    python -m tests.model_sweep llama gemma3     only these, in place of their old results

Each family is made, loaded, adapted and computed as in a run, in a process of its own, and compared with
transformers and PEFT alone on padded rows: log-probabilities and gradients. Takes a quarter of an hour.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig as PeftLoraConfig
from peft import get_peft_model
from torch import Tensor

from skylite.adapters.peft_targets import exactly_these_modules
from skylite.adapters.target_modules import EXPERTS, last_names, predict_modules
from skylite.engine.model_check import takes_expert_lora
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.models import vllm_version
from skylite.errors import SkyliteError
from skylite.hub.families import TABLE, Family, read_sweep
from skylite.hub.resolve import check_folder, tensor_shapes
from skylite.hub.text_model import auto_class, is_wrapper, read_config
from skylite.model.fast_path_check import OWN_ATTENTION, enable_shortcuts
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy, load_policy, score
from skylite.model.process_group import Dist
from skylite.types import TrainingExample
from tests.decisions import resolved
from tests.forks import in_a_fork
from tests.rows import completions_of
from tests.small_run import lone_rank, settings
from tests.tiny_families import make_family

PROGRESS = Path(__file__).resolve().parents[1] / "build" / "models-sweep"
"""A file for each family that is done. Removed with the end of the sweep."""
LIMIT_S = 120.0
LOGPROBS, GRADIENT = 1e-4, 1e-5
"""Largest differences: nats, and relative to the gradient's norm."""
PROMPTS = [list(range(20, 44)), list(range(100, 115))]
COMPLETIONS = [
    [(7 * i + 3) % 256 for i in range(40)],
    [(5 * i + 90) % 256 for i in range(23)],
    [(7 * i + 3) % 256 for i in range(9)] + [11 * i for i in range(17)],
]
"""The first and the last share their beginning, so that the tree also branches inside completions."""
ROWS = [(group, prompt, c) for group, prompt in enumerate(PROMPTS) for c in COMPLETIONS]
PROBE = PROMPTS[0]


class Refused(Exception):
    """Why the family is refused, in words that complete `skylite does not train it: ...`."""


def measure(name: str, folder: Path) -> Family:
    """What the trainer does with a tiny model of the family, made in `folder`."""
    torch.set_num_threads(1)  # a fork has none of its parent's threads
    family = Family(name=name, architecture="", refused="")
    try:
        family = _made(family, folder)
        with lone_rank() as dist:
            return _computed(family, folder, dist)
    except Refused as refusal:
        return replace(family, refused=str(refusal))


def _made(family: Family, folder: Path) -> Family:
    """Make the model, and read what its files say."""
    try:
        make_family(folder, family.name)
    except ImportError as error:
        raise Refused(f"transformers needs a package for it: {_line(error)}") from error
    except Exception as error:
        traceback.print_exc()
        raise Refused("no tiny model of it could be made, so it was not tried") from error
    config = read_config(folder)
    try:
        check_folder(folder, "")
    except SkyliteError as error:
        raise Refused("it is not a causal language model") from error
    return replace(
        family,
        architecture=str(config["architectures"][0]),
        experts=(experts := any(EXPERTS in name for name in tensor_shapes(folder))),
        expert_lora=experts and takes_expert_lora(folder, VllmLauncher(), settings().lora),
        parts=is_wrapper(config),
        on_gpu=_not_served(folder, "cuda"),
        on_cpu=_not_served(folder, "cpu"),
    )


def _not_served(folder: Path, device: str) -> str:
    lora = settings().lora
    try:
        VllmLauncher().check_model(folder, device, lora.max_rank, lora)
    except SkyliteError as error:
        return error.what
    return ""


def _computed(family: Family, folder: Path, dist: Dist) -> Family:
    """Compute completions and a gradient as a run does, and as transformers and PEFT do."""
    try:
        policy, lines = trained_policy(folder, dist)
        plain = plain_model(folder, policy)
        expected = plain_logprobs(plain)
        right = gradient(expected, [dict(plain.named_parameters())[name] for name in policy.lora])
        seen = looks_ahead(plain)
    except SkyliteError as error:
        if error.what.startswith("No module of"):
            raise Refused("none of its layers can have LoRA") from error
        raise Refused(error.what.replace(str(folder), "it").rstrip(".")) from error
    except Exception as error:
        traceback.print_exc()
        raise Refused("transformers does not compute it from rows of tokens alone") from error
    if seen > LOGPROBS:
        raise Refused("its tokens see later ones, so it is not a causal language model")
    predicted, found = (
        last_names(predict_modules(folder, settings().lora)[1]),
        last_names(policy.target_modules),
    )
    if predicted != found:
        words = [
            ", ".join(sorted({*a} - {*b})) or "none" for a, b in ((predicted, found), (found, predicted))
        ]
        raise Refused(f"the modules in its files ({words[0]}) are others than transformers' ({words[1]})")
    got, _ = score(policy, pack_tokens(examples(), policy.packing, policy.device), temperature=1.0)
    ours = gradient(got, list(policy.lora.values()))
    gaps = float((got - expected).detach().abs().max()), float((ours - right).norm() / right.norm())
    if not gaps[0] <= LOGPROBS or not gaps[1] <= GRADIENT:
        raise Refused(
            f"it differs from transformers and PEFT by {gaps[0]:.1e} nats, its gradient by {gaps[1]:.1e}"
        )
    return replace(
        family,
        packing=policy.packing,
        packing_reason="" if policy.packing == "tree" else padded_reason(lines),
        logprobs=float(f"{gaps[0]:.1e}"),
        gradient=float(f"{gaps[1]:.1e}"),
    )


def padded_reason(lines: Sequence[str]) -> str:
    """Why no tree, by the line of fast_path_check.py, without what an exception said."""
    reason = next(line for line in lines if line.startswith("packing:")).split("; ")[1]
    if reason.startswith(("the model does not support it", OWN_ATTENTION)):
        return "its own attention takes no tree"
    return "a tree gives other log-probabilities" if reason.startswith("mean logprob") else reason


def trained_policy(folder: Path, dist: Dist) -> tuple[Policy, list[str]]:
    """The policy as a run loads it, with B matrices that are not zero, and the lines of its shortcuts."""
    policy = load_policy(resolved(folder, folder), settings(), dist)
    generator = torch.Generator().manual_seed(1)
    for name, param in policy.lora.items():
        if "lora_B" in name:
            param.data.normal_(std=0.05, generator=generator)
    return enable_shortcuts(policy, PROBE)


def plain_model(folder: Path, policy: Policy) -> Any:
    """The same weights in transformers and PEFT alone, with transformers' eager attention."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder)
    base = auto_class(config).from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    paths = sorted({name.partition(".lora_")[0].removeprefix("base_model.model.") for name in policy.lora})
    lora = PeftLoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=paths)
    with exactly_these_modules():
        model = get_peft_model(base, lora)
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    if params.keys() != policy.lora.keys():
        raise Refused("PEFT adapts other modules than it was given")
    for name, param in params.items():
        param.data.copy_(policy.lora[name].data)
    return model.eval()


def plain_logprobs(model: Any) -> Tensor:
    """[C] log-probabilities of the completions' tokens in nats, all rows in one padded call."""
    lengths = [len(prompt) + len(completion) for _, prompt, completion in ROWS]
    longest = max(lengths)
    padded = [[*p, *c, *[0] * (longest - len(p) - len(c))] for _, p, c in ROWS]
    mask = torch.arange(longest) < torch.tensor(lengths)[:, None]
    logits = model(input_ids=torch.tensor(padded), attention_mask=mask.long(), use_cache=False).logits
    table = logits.float().log_softmax(-1)
    return torch.cat([
        table[i, len(p) - 1 : len(p) + len(c) - 1].gather(1, torch.tensor(c)[:, None])[:, 0]
        for i, (_, p, c) in enumerate(ROWS)
    ])  # fmt: skip


def examples() -> list[TrainingExample]:
    """The same rows for the trainer."""
    return completions_of([p for _, p, _ in ROWS], [c for _, _, c in ROWS], [g for g, _, _ in ROWS])


def gradient(logprobs: Tensor, params: Sequence[Tensor]) -> Tensor:
    """[P] gradient of a weighted sum of the log-probabilities."""
    weights = torch.linspace(-1, 1, len(logprobs))
    found = torch.autograd.grad((weights * logprobs).sum(), params, allow_unused=True)
    return torch.cat([
        (torch.zeros_like(param) if grad is None else grad).flatten()
        for grad, param in zip(found, params, strict=True)
    ])  # fmt: skip


@torch.no_grad()
def looks_ahead(model: Any) -> float:
    """How much the last token changes logits before it."""
    ids = torch.tensor([PROMPTS[0] + COMPLETIONS[0]])
    other = ids.clone()
    other[0, -1] = 77
    first, second = (model(input_ids=x, use_cache=False).logits[0, :-1] for x in (ids, other))
    return float((first - second).abs().max())


def _line(error: Exception) -> str:
    """Its first sentence."""
    return re.split(r"\.\s|\.$", " ".join(str(error).split()))[0][:150]


def in_a_process(name: str) -> Family:
    """`measure` in a fork, which may hang, crash or leave a process group."""
    with tempfile.TemporaryDirectory() as root:
        try:
            text = in_a_fork(lambda: asdict(measure(name, Path(root) / name)), LIMIT_S)
        except TimeoutError:
            return Family(name=name, architecture="", refused=f"a step of it takes longer than {LIMIT_S:g} s")
    return Family(**json.loads(text)) if text else Family(name=name, architecture="", refused="it crashed")


def all_families() -> list[str]:
    """Every model_type that transformers computes as a causal or an image-text model."""
    from transformers.models.auto import modeling_auto as auto

    causal, images = auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES
    return sorted({*causal, *images})


def write_table(families: Iterable[Family]) -> None:
    """families.json, a family in each line."""
    lines = ",\n".join("  " + json.dumps(asdict(f)) for f in sorted(families, key=lambda f: f.name))
    versions = json.dumps({"transformers": metadata.version("transformers"), "vllm": vllm_version()})
    TABLE.write_text(f'{versions[:-1]}, "families": [\n{lines}\n]}}\n', encoding="utf-8")


def sweep(name: str) -> Family:
    """The family's result, printed on one line."""
    family = in_a_process(name)
    print(
        f"{name}: {family.refused or f'{family.packing}, {family.logprobs}, {family.gradient}'}", flush=True
    )
    return family


def main(names: Sequence[str]) -> None:
    """Sweep the named families, or all."""
    if names:
        families = dict(read_sweep().families)
        for name in names:
            families[name] = sweep(name)
            write_table(families.values())
        return
    PROGRESS.mkdir(parents=True, exist_ok=True)
    for name in all_families():
        if not (done := PROGRESS / f"{name}.json").exists():
            done.write_text(json.dumps(asdict(sweep(name))), encoding="utf-8")
    found = [Family(**json.loads(path.read_text(encoding="utf-8"))) for path in PROGRESS.glob("*.json")]
    write_table(found)
    shutil.rmtree(PROGRESS)


if __name__ == "__main__":
    main(sys.argv[1:])
