"""The trainer's verbs in this process, on one rank: for notebooks and loops of your own without a server."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as torch_dist
from torch import Tensor

from skylite.config.loading import load_config
from skylite.config.provenance import Provenance, Typed
from skylite.data.chat_tokenizer import ChatTokenizer, load_tokenizer
from skylite.errors import ConfigError
from skylite.model.process_group import process_group, set_threads
from skylite.processes.private_folders import make_own_folder
from skylite.run.own_folders import lock_folder
from skylite.run.run_dir import adapter_name, published_versions
from skylite.service.plan import Base, plan_base, write_base
from skylite.trainer.policies import Policies, load_policies
from skylite.verbs import AdamParams, Datum, Scored, loss_settings

POLICY = "policy"
LONE_RANK = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
OwnLoss = Callable[[Sequence[Datum], list[Tensor]], Tensor]
"""Data and the logprobs of their targets, which want a gradient -> the loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalTrainer:
    """One policy on one base. `with`, or `close`, ends it."""

    base: Base
    policies: Policies
    tokenizer: ChatTokenizer
    _stack: contextlib.ExitStack

    def encode(self, text: str) -> list[int]:
        """Token ids of a plain text, without special tokens."""
        return self.tokenizer.encode_texts([text])[0]

    def forward(self, data: Sequence[Datum], loss: str = "cross_entropy", **settings: float) -> Scored:
        """Logprobs of the targets and the loss, without a gradient. Raises ConfigError."""
        return self._pass(data, loss, settings, backward=False)

    def forward_backward(
        self, data: Sequence[Datum], loss: str | OwnLoss = "cross_entropy", **settings: float
    ) -> Scored:
        """The same, and add the loss's gradient to that of the next `optim_step`. Raises ConfigError.

        `loss`: a name of verbs.LOSS_FORMS, or a function of data and logprobs (a second pass takes its
        gradient back through the model).
        """
        if isinstance(loss, str):
            return self._pass(data, loss, settings, backward=True)
        scored = self._pass(data, "cross_entropy", {}, backward=False)
        logprobs = [torch.from_numpy(x.copy()).requires_grad_() for x in scored.logprobs]
        value = loss(data, logprobs)
        gradients = torch.autograd.grad(value, logprobs, allow_unused=True)
        linear = [
            Datum(
                token_ids=datum.token_ids,
                targets=datum.targets,
                width=datum.width,
                inputs={"weights": -(x.detach() * 0 if g is None else g).float().numpy()},
            )
            for datum, x, g in zip(data, logprobs, gradients, strict=True)
        ]
        self._pass(linear, "cross_entropy", {}, backward=True)
        return Scored(logprobs=scored.logprobs, loss=float(value.detach()))

    def optim_step(self, learning_rate: float, **params: float) -> float:
        """Update with AdamW and start a new gradient. Returns the gradient's norm. Raises ConfigError.

        `params`: the other fields of verbs.AdamParams.
        """
        return self.policies.optim_step(POLICY, asdict(AdamParams(learning_rate=learning_rate, **params)))

    def save(self, folder: str | Path) -> None:
        """Write parameters and moments, in place of what the folder holds. Raises WriteFailed."""
        place = Path(folder).resolve() / "step-000000"
        place.parent.mkdir(parents=True, exist_ok=True)
        self.policies.save(POLICY, str(place))

    def load(self, folder: str | Path, *, optimizer: bool = True) -> None:
        """Load what `save` wrote. Raises ModelError for another rank or other modules."""
        self.policies.load(POLICY, str(Path(folder).resolve() / "step-000000"), optimizer)

    def publish(self) -> Path:
        """Write the adapter as a PEFT folder, such as FOLDER/adapters/policy-v000001, and return it."""
        adapters = self.base.run.default_adapters
        version = 1 + max((a.version for a in published_versions(adapters)), default=0)
        self.policies.publish(POLICY, version)
        return adapters / adapter_name(version)

    def close(self) -> None:
        """Free the model, the folder and the tokenizer's process."""
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _pass(
        self, data: Sequence[Datum], loss: str, settings: Mapping[str, float], *, backward: bool
    ) -> Scored:
        numbers = loss_settings(loss, settings)
        checked = [datum.checked(loss, self.base.vocabulary) for datum in data]
        messages = [datum.to_message() for datum in checked]
        found = self.policies.forward_backward(POLICY, messages, loss, numbers, backward)
        return Scored(logprobs=found["logprobs"], loss=found["loss"])


def open_trainer(
    model: str, folder: str | Path, rank: int, seed: int, settings: Mapping[str, Any]
) -> LocalTrainer:
    """See `skylite.open_trainer`."""
    if torch_dist.is_initialized():
        raise ConfigError(
            "This process has a trainer, or another process group of torch, already.",
            "Close it first, or start the Python kernel again.",
        )
    typed = {"model.name": model, "lora.rank": rank, "seed": seed, "algorithm.name": "sft", **settings}
    provenance = Provenance(typed={name: Typed(value, name) for name, value in typed.items()})
    base = plan_base(load_config(None, provenance), Path(folder), provenance)
    run, config = base.run, base.run_config.config
    with contextlib.ExitStack() as stack:
        make_own_folder(run.root, "Choose a folder of your own.")
        stack.enter_context(lock_folder(run.root))
        write_base(base)
        tokenizer = load_tokenizer(base.run_config.resolved.model.path)
        stack.callback(tokenizer.close)
        os.environ.update(LONE_RANK, TORCHELASTIC_RUN_ID=uuid.uuid4().hex)
        set_threads(config.trainer.num_threads)
        dist = stack.enter_context(process_group(base.run_config.resolved.placement.device, run.rendezvous))
        policies = load_policies(run, base.run_config, base.canary, dist)
        policies.add(POLICY, {}, seed)
        return LocalTrainer(base=base, policies=policies, tokenizer=tokenizer, _stack=stack.pop_all())
