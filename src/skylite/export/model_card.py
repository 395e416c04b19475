"""The README.md of an export: what it is, how it was trained, how well it does, how to use it.

Names and data descriptions may be those of strangers: they appear as plain text in code spans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, read_prompts
from skylite.engine.vllm.memory import served_rank
from skylite.errors import DataError
from skylite.evaluation.confidence_interval import score_name, score_value
from skylite.export.canary_check import Check
from skylite.export.plan import ExportPlan
from skylite.hub.text_model import is_wrapper, quantised_format, read_config
from skylite.run.metrics_file import read_metrics
from skylite.untrusted_text import plain

MESSAGES = "first_messages.json"
"""File with the turns before the question of every training prompt."""
CURVES = {
    "reward/mean": "mean reward",
    "reward/right_frac": "share of right completions",
    "completion/tokens_mean": "tokens per completion",
    "policy/entropy": "entropy in nats",
}


def model_card(plan: ExportPlan, data: PromptFileInfo | None, checks: Sequence[Check]) -> str:
    """The card as Markdown with the hub's metadata. `data`: how the training data was made, if known."""
    config = plan.run_config.config
    parts = [
        front_matter(plan),
        f"# {plan.out.name}\n\n{what_it_is(plan)}",
        f"## Use\n\n{use(plan)}\n\n{about_prompts(data)}",
        f"## Data\n\n{about_data(config, data)}",
        f"## Training\n\n{settings_table(plan, config)}\n\n{results(plan)}",
        f"## Checks\n\n{about_checks(checks)}",
    ]
    return "\n\n".join(part.strip() for part in parts) + "\n"


def front_matter(plan: ExportPlan) -> str:
    from huggingface_hub import ModelCardData

    library = "transformers" if plan.merge else "gguf" if plan.gguf else "peft"
    card = ModelCardData(
        base_model=base_model(plan),
        library_name=library,
        pipeline_tag="text-generation",
        tags=["lora", "reinforcement-learning", plan.run_config.config.algorithm.name, "skylite"],
    )
    return f"---\n{card.to_yaml().strip()}\n---"


def what_it_is(plan: ExportPlan) -> str:
    kind = "A LoRA adapter"
    if plan.has_merged_weights:
        forms = [f for f, wanted in (("safetensors", plan.merge), ("GGUF", plan.gguf)) if wanted]
        kind = f"Merged weights ({plan.dtype}, {' and '.join(forms)})"
    config = plan.run_config.config
    merged = ""
    if plan.original is not None:
        merged = (
            "The adapter was trained on that quantised model, and is merged into the one that it was made "
            f"from, {code(shown_original(plan))}: near the model that was trained, not equal to it. "
        )
    elif quantised_format(plan.base.path) is not None and plan.has_merged_weights:
        merged = "It is merged into the widened weights of that quantised model: the model that was trained. "
    return (
        f"{kind} for {code(shown_base(plan))}, trained with {code(config.algorithm.name)} on verifiable "
        f"rewards. {merged}It is the policy after step {plan.served.adapter.version} of {config.num_steps}. "
        f"Made by skylite {code(plan.run_config.skylite_version)}. The base model's licence applies."
    )


def base_model(plan: ExportPlan) -> str | None:
    """Hub id of the model below the export; None for a local folder."""
    if plan.original is not None:
        return plan.original_name if plan.original.revision is not None else None
    return None if plan.is_base_local else plan.base_name


def shown_original(plan: ExportPlan) -> str:
    """The original without the folders of this machine."""
    return base_model(plan) or Path(plan.original_name).name


def shown_base(plan: ExportPlan) -> str:
    """The base without the folders of this machine."""
    return Path(plan.base_name).name if plan.is_base_local else plan.base_name


def use(plan: ExportPlan) -> str:
    rank = plan.run_config.config.lora.max_rank
    reserved = served_rank(rank)
    if plan.gguf and not plan.merge:
        return f"```bash\nllama-cli -m {plan.name}-{plan.dtype}.gguf\n```"
    wrapper = is_wrapper(read_config(plan.base.path))
    loader = "AutoModelForImageTextToText" if wrapper else "AutoModelForCausalLM"
    if plan.merge:
        return (
            f"```python\nfrom transformers import {loader}, AutoTokenizer\n\n"
            f'model = {loader}.from_pretrained("FOLDER")\n'
            'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```\n\n'
            "```bash\nvllm serve FOLDER\n```"
        )
    imports = "from peft import AutoPeftModelForCausalLM\nfrom transformers import AutoTokenizer"
    load = 'AutoPeftModelForCausalLM.from_pretrained("FOLDER")'
    if wrapper:
        imports = f"from peft import PeftModel\nfrom transformers import {loader}, AutoTokenizer"
        load = f'PeftModel.from_pretrained({loader}.from_pretrained("BASE"), "FOLDER")'
    modules = "--lora-modules mine=FOLDER"
    if plan.manifest.target_parameters:
        modules = (
            "--enable-mixed-moe-lora-format \\\n"
            """  --lora-modules '{"name": "mine", "path": "FOLDER", "is_3d_lora_weight": true}'"""
        )
    if plan.served.is_on_tower:
        modules = f"--enable-tower-connector-lora \\\n  {modules}"
    return (
        f"```python\n{imports}\n\nmodel = {load}\n"
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER")\n```\n\n'
        f"```bash\nvllm serve BASE --enable-lora --max-lora-rank {reserved} "
        f"{modules}\n```\n\nThe rank is {rank}."
    )


def data_info(config: TrainConfig) -> PromptFileInfo | None:
    """How the training data was made; None if it is gone."""
    try:
        return read_prompts(Path(config.data.path) / "train.parquet")[1]
    except DataError:
        return None


def about_prompts(info: PromptFileInfo | None) -> str:
    if info is None or not (info.system or info.few_shot):
        return ""
    return (
        f"It was trained on conversations that begin with the messages in `{MESSAGES}`. Begin with them too, "
        "or it sees prompts that it was not trained on."
    )


def about_data(config: TrainConfig, info: PromptFileInfo | None) -> str:
    if info is None:
        return "The data folder of the run was not found when this card was written."
    lines = [
        f"- data set: {code(info.dataset)} ({info.source_kind}), {info.count} training problems",
        f"- sha256 of the source: {code(info.source_sha256)}",
        about_rewards(config, info),
        f"- examples in each prompt: {len(info.few_shot) // 2}",
        f"- system prompt: {code(info.system) if info.system else 'none'}",
    ]
    return "\n".join(lines)


def about_rewards(config: TrainConfig, info: PromptFileInfo) -> str:
    """What scored the completions: the environment, the chosen functions, or the reward of the data."""
    names = [code(Path(spec).name) for spec in config.source.scorers or [info.reward]]
    return f"- {config.source.scored_by}{'s' if len(names) > 1 else ''}: {', '.join(names)}"


def settings_table(plan: ExportPlan, config: TrainConfig) -> str:
    placement = plan.run_config.resolved.placement
    rows = {
        "algorithm": config.algorithm.name,
        "steps": f"{plan.served.adapter.version} of {config.num_steps}",
        "LoRA rank, alpha": f"{plan.manifest.rank}, {plan.manifest.alpha:g}",
        "adapted modules": ", ".join(
            sorted([*plan.manifest.target_modules, *plan.manifest.target_parameters])
        ),
        "learning rate": f"{config.optim.lr:g} ({config.optim.schedule})",
        "prompts per step, completions per prompt": (
            f"{config.rollout.prompts_per_step}, {config.rollout.group_size}"
        ),
        "temperature": f"{config.rollout.temperature:g}",
        "longest completion": f"{config.rollout.max_completion_tokens} tokens",
        "KL coefficient": f"{config.algorithm.kl_coef:g}",
        "difficulty": ", ".join(map(str, config.data.difficulty)) or "all",
        "seed": str(config.seed),
        "compute": f"{placement.device}, {placement.dtype}",
    }
    return "| setting | value |\n|---|---|\n" + "\n".join(f"| {k} | {code(v)} |" for k, v in rows.items())


def results(plan: ExportPlan) -> str:
    """Held-out scores, and the metrics of the first and the exported step."""
    lines = []
    if plan.scores:
        config = plan.run_config.config.eval
        lines += [
            f"Held-out problems (greedy, first {config.limit} problems of {config.split}):\n",
            f"| step | {score_name(is_binary=plan.is_binary)} |\n|---|---|",
            *(
                f"| {step} | {score_value(score, is_binary=plan.is_binary)} |"
                for step, score in sorted(plan.scores.items())
            ),
            "",
        ]
    steps = [m for m in read_metrics(plan.run.metrics_path) if m["step"] <= plan.served.adapter.version]
    has_partial = any(number(m.get("reward/partial_frac")) > 0 for m in steps)
    for key, title in CURVES.items():
        if key == "reward/right_frac" and has_partial:
            continue
        values = [number(m.get(key)) for m in steps]
        finite = [v for v in values if math.isfinite(v)]
        if len(finite) > 1:
            lines.append(f"- {title}: {finite[0]:.4g} at first, {finite[-1]:.4g} at last")
    return "\n".join(lines)


def number(value: object) -> float:
    return float(value) if isinstance(value, int | float) else math.nan


def about_checks(checks: Sequence[Check]) -> str:
    lines = [f"- {check}.{f' Note: {check.note}.' if check.note else ''}" for check in checks]
    return "\n".join(["Each form was loaded again after it was written:\n", *lines])


def code(text: str) -> str:
    """A stranger's text as a code span in one line, also in a table."""
    return f"`{plain(text).replace('`', ' ').replace('|', '/').strip() or ' '}`"
