"""Published implementations to compare with: TRL, verl and SkyRL.

TRL is an ordinary package. verl and SkyRL require Ray and conflicting versions of our dependencies.
`make setup` therefore installs only their wheels, into the folder `peers`, which is on no import path.
Their formulas run unchanged. While they load, empty modules replace the packages that they import for
transport, configuration and logging.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

PEERS = Path(sys.prefix) / "peers"
VERSIONS = {"trl": "1.16.0", "verl": "0.9.1", "skyrl": "0.3.0"}


class VerlConfig(SimpleNamespace):
    """The fields of verl's ActorConfig that its losses read."""

    def get(self, name: str, default: Any = None) -> Any:
        return getattr(self, name, default)


def load_trl() -> SimpleNamespace:
    """TRL's GRPO trainer and its overlong punishment."""
    _require("trl", [])
    from trl import import_utils

    with pytest.MonkeyPatch.context() as patch:
        # TRL imports vLLM if it is installed. That takes as long as all these tests, and no formula needs it.
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        trainer = importlib.import_module("trl.trainer.grpo_trainer")
        rewards = importlib.import_module("trl.rewards")
    return SimpleNamespace(trainer=trainer, overlong=rewards.get_soft_overlong_punishment)


def load_trl_supervised() -> SimpleNamespace:
    """TRL's SFT and DPO trainers."""
    _require("trl", [])
    return SimpleNamespace(
        sft=importlib.import_module("trl.trainer.sft_trainer"),
        dpo=importlib.import_module("trl.trainer.dpo_trainer"),
    )


def load_trl_gkd() -> Callable[..., torch.Tensor]:
    """The loss of TRL's GKD trainer."""
    _require("trl", [])
    from trl import import_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        trainer = importlib.import_module("trl.experimental.gkd.gkd_trainer")
    loss: Callable[..., torch.Tensor] = trainer.GKDTrainer.generalized_jsd_loss
    return loss


def load_trl_server_distillation() -> ModuleType:
    """TRL's distillation from a teacher on a server."""
    _require("trl", [])
    from trl import import_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_utils, "is_vllm_available", lambda *_, **__: False)
        patch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
        return importlib.import_module("trl.experimental.server_distillation.server_distillation_trainer")


def load_verl() -> SimpleNamespace:
    """verl's advantages and losses (`core`) and its importance weights (`corrections`)."""
    _require("verl", [str(PEERS)])
    fakes: dict[str, dict[str, Any]] = {
        "omegaconf": {"DictConfig": object, "ListConfig": object, "OmegaConf": object},
        "tensordict": {"TensorDict": type("TensorDict", (), {})},
        "verl.protocol": {"DataProto": object},
        "verl.workers.config": {"ActorConfig": VerlConfig},
        "verl.workers.config.actor": {"PolicyLossConfig": object},
    }
    with _only_while_loading(["verl", "verl.trainer", "verl.trainer.ppo", "verl.workers"], fakes):
        core = importlib.import_module("verl.trainer.ppo.core_algos")
        corrections = importlib.import_module("verl.trainer.ppo.rollout_corr_helper")
    return SimpleNamespace(core=core, corrections=corrections)


def load_skyrl() -> ModuleType:
    """SkyRL's advantages and losses."""
    _require("skyrl", [str(PEERS)])
    annotation = type("Annotation", (), {"__class_getitem__": classmethod(lambda cls, _: object)})
    fakes: dict[str, dict[str, Any]] = {
        "ray": {"remote": lambda actor: actor, "is_initialized": lambda: False},
        "omegaconf": {"DictConfig": object},
        "jaxtyping": {"Float": annotation, "Integer": annotation},
        "loguru": {"logger": None},
        "skyrl.train": {},
        "skyrl.train.config": {"AlgorithmConfig": object},
    }
    bare = ["skyrl", "skyrl.backends", "skyrl.backends.skyrl_train", "skyrl.backends.skyrl_train.utils"]
    with _only_while_loading(bare, fakes):
        return importlib.import_module("skyrl.backends.skyrl_train.utils.ppo_utils")


class OneProcess:
    """accelerate's Accelerator for one process."""

    num_processes = 1
    process_index = 0
    sync_gradients = True
    device = torch.device("cpu")

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor

    def reduce(self, tensor: torch.Tensor, reduction: str) -> torch.Tensor:
        return tensor

    def pad_across_processes(self, tensor: torch.Tensor, dim: int, pad_index: float) -> torch.Tensor:
        return tensor


def _require(name: str, path: list[str]) -> None:
    if VERSIONS[name] not in _installed(name, path):
        where = path[0] if path else sys.prefix
        pytest.fail(
            f"{name} {VERSIONS[name]} is not installed in {where}, and the tests compare formulas with it; "
            "run `make setup`."
        )


def _installed(name: str, path: list[str]) -> list[str]:
    """The versions of a package in `path`; empty: on the import path."""
    return [d.version for d in importlib.metadata.distributions(name=name, path=path or sys.path)]


@contextmanager
def _only_while_loading(bare: list[str], fakes: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Load packages of PEERS without their __init__ (`bare`) and with fake modules (`fakes`).

    Restores sys.modules at the end.
    """
    before = dict(sys.modules)
    packages = {name.partition(".")[0] for name in [*bare, *fakes]}
    for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
        del sys.modules[name]
    for name in bare:
        sys.modules[name] = ModuleType(name)
        sys.modules[name].__path__ = [str(PEERS.joinpath(*name.split(".")))]
    for name, names in fakes.items():
        sys.modules[name] = ModuleType(name)
        vars(sys.modules[name]).update(names)
    try:
        yield
    finally:
        for name in [n for n in sys.modules if n.partition(".")[0] in packages]:
            del sys.modules[name]
        sys.modules.update({n: m for n, m in before.items() if n.partition(".")[0] in packages})
