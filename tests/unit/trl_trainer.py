"""TRL's GRPOTrainer, reduced to what its loss reads."""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch

from tests.unit.peer_cases import MAX_TOKENS
from tests.unit.peer_code import OneProcess


def trl_trainer(trl: SimpleNamespace, **settings: Any) -> Any:
    """A GRPOTrainer without its __init__: only the attributes that its loss reads, with TRL's defaults."""
    config = trl.trainer.GRPOConfig
    default = {
        name: config.__dataclass_fields__[name].default
        for name in config.__dataclass_fields__
        if name.startswith(("sapo_", "vespo_"))
    }
    args = {
        **default,
        "delta": None,
        "use_bias_correction_kl": False,
        "steps_per_generation": 1,
        **settings.pop("args", {}),
    }
    trainer = object.__new__(trl.trainer.GRPOTrainer)
    model = torch.nn.Linear(1, 1)
    vars(model)["is_gradient_checkpointing"] = False
    vars(trainer).update(
        {
            "model": model,
            "accelerator": OneProcess(),
            "args": SimpleNamespace(**args),
            "aux_loss_enabled": False,
            "top_entropy_quantile": 1.0,
            "off_policy_mask_threshold": None,
            "importance_sampling_level": "token",
            "beta": 0.0,
            "epsilon_low": 0.2,
            "epsilon_high": 0.2,
            "use_vllm": False,
            "vllm_importance_sampling_correction": False,
            "current_gradient_accumulation_steps": 1,
            "max_completion_length": MAX_TOKENS,
            "use_adaptive_entropy": False,
            "entropy_coef": 0.0,
            "_entropy_bonus_enabled": False,
            "_metrics": {"train": defaultdict(list)},
        }
        | settings
    )
    return trainer
