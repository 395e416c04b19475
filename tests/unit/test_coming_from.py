"""docs/how-to/coming-from.md: every name exists in skylite, TRL, PEFT, verl and SkyRL as installed."""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import fields
from functools import cache
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from skylite.config.train import TrainConfig
from tests.unit.doc_blocks import ROOT
from tests.unit.peer_code import PEERS, load_trl

PAGE = ROOT / "docs" / "how-to" / "coming-from.md"
SKYLITE, TRL, VERL, SKYRL = range(4)


def names(column: int) -> list[str]:
    """The names in a column of the table "Settings"."""
    section = PAGE.read_text(encoding="utf-8").partition("## Settings")[2].partition("\n## ")[0]
    rows = [line.strip("|").split("|") for line in section.splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 30
    found = [name for row in rows for name in re.findall(r"`([^`]+)`", row[column + 1])]
    return [name.partition("=")[0] for name in found if not name.startswith("skylite ")]


def in_config(name: str) -> bool:
    kind: Any = TrainConfig
    for part in name.split("."):
        if not issubclass(kind, BaseModel) or part not in kind.model_fields:
            return False
        annotation = kind.model_fields[part].annotation
        kind = annotation if isinstance(annotation, type) else object
    return True


@cache
def trl_names() -> set[str]:
    from peft import LoraConfig

    trainer = load_trl().trainer
    arguments = inspect.signature(trainer.GRPOTrainer.__init__).parameters
    return {*arguments, *(f.name for kind in (trainer.GRPOConfig, LoraConfig) for f in fields(kind))}


@cache
def verl_tree() -> dict[str, Any]:
    text = (PEERS / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    tree: dict[str, Any] = yaml.safe_load(text)
    return tree


@cache
def verl_async_tree() -> dict[str, Any]:
    path = PEERS / "verl/experimental/fully_async_policy/config/fully_async_ppo_trainer.yaml"
    tree: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    return tree


def in_verl(name: str) -> bool:
    tree: Any = verl_async_tree() if name.startswith("async_training.") else verl_tree()
    for part in name.split("."):
        if not isinstance(tree, dict) or part not in tree:
            return False
        tree = tree[part]
    return True


@cache
def skyrl_classes() -> dict[str, dict[str, str]]:
    """Class -> field -> annotation, read from its source: importing it needs Ray."""
    tree = ast.parse((PEERS / "skyrl/train/config/config.py").read_text(encoding="utf-8"))
    return {
        node.name: {
            item.target.id: ast.unparse(item.annotation)
            for item in node.body
            if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        }
        for node in tree.body
        if isinstance(node, ast.ClassDef)
    }


def in_skyrl(name: str) -> bool:
    kind = "SkyRLTrainConfig"
    for part in name.split("."):
        annotations = skyrl_classes().get(kind, {})
        if part not in annotations:
            return False
        kind = annotations[part]
    return True


def test_every_name_exists() -> None:
    assert [n for n in names(SKYLITE) if not in_config(n)] == []
    assert [n for n in names(TRL) if n not in trl_names()] == []
    assert [n for n in names(VERL) if not in_verl(n)] == []
    assert [n for n in names(SKYRL) if not in_skyrl(n)] == []


@pytest.mark.parametrize("check", [in_config, in_verl, in_skyrl])
def test_a_name_that_does_not_exist_is_found(check: Any) -> None:
    assert not check("trainer.no_such_setting")
    assert not check("seed.more")


def test_the_defaults_that_the_page_states() -> None:
    config = TrainConfig()
    assert (config.optim.lr, config.optim.schedule, config.algorithm.kl_coef) == (2e-5, "constant", 0)
    assert (config.importance.mode, config.importance.level, config.importance.cap) == (
        "truncate",
        "token",
        2,
    )
    trl = {f.name: f.default for f in fields(load_trl().trainer.GRPOConfig)}
    assert (trl["learning_rate"], trl["beta"]) == (1e-6, 0.0)
    assert str(getattr(trl["lr_scheduler_type"], "value", trl["lr_scheduler_type"])) == "linear"
    assert trl["vllm_importance_sampling_mode"] == "sequence_mask"
    assert trl["vllm_importance_sampling_clip_max"] == 3.0
    actor = verl_tree()["actor_rollout_ref"]["actor"]
    assert (float(actor["optim"]["lr"]), actor["use_kl_loss"]) == (1e-6, False)
    assert verl_tree()["algorithm"]["rollout_correction"]["rollout_is"] is None
    source = (PEERS / "skyrl/train/config/config.py").read_text(encoding="utf-8")
    for line in ("lr: float = 1e-6", "use_kl_loss: bool = True", "kl_loss_coef: float = 0.001"):
        assert f"    {line}\n" in source
    assert "    tis_ratio_type: Optional[str] = None\n" in source
