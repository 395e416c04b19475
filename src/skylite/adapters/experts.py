"""LoRA on the weights of experts: which layers of a model get it, and its sizes.

transformers joins the experts of a layer in two parameters, `experts.gate_up_proj` and `experts.down_proj`.
PEFT adapts parameters by lora.target_parameters. In its files the matrices of the first are named
`experts.base_layer.lora_A`, those of the second `experts.lora_A`, each for all experts at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from skylite.config.lora import LoraConfig
from skylite.errors import ModelError

MODULE = "experts"
"""The name of the module, in transformers as in vLLM."""
PARAMETERS = ("gate_up_proj", "down_proj")
"""Of the module, in the order in which PEFT adapts them."""
BASE_LAYER = ".base_layer"
BOTH = [f"{MODULE}.{name}" for name in PARAMETERS]
"""lora.target_parameters for all experts."""


class ExpertSizes(NamedTuple):
    """The routed experts of one layer."""

    number: int
    hidden: int
    inner: int

    @property
    def lora_per_rank(self) -> int:
        """Elements of A and B of rank 1 in PEFT's form: gate and up share an A."""
        return self.number * (2 * self.hidden + 3 * self.inner)

    @property
    def slots_per_rank(self) -> int:
        """The same in vLLM's form: gate and up have an A each."""
        return self.number * 3 * (self.hidden + self.inner)


def expert_layers(shapes: Mapping[str, Sequence[int]]) -> dict[str, ExpertSizes]:
    """Path of each module of experts -> its sizes, from the shapes of a model's tensors by name.

    Files hold the matrices of experts apart (`experts.5.gate_proj.weight`), or those of a layer in one tensor
    (`experts.gate_up_proj`). Leaves out experts with other names, such as Mixtral's w1.
    """
    found: dict[str, ExpertSizes] = {}
    counts: dict[str, int] = {}
    for name in shapes:
        path, middle, rest = name.partition(f".{MODULE}.")
        if middle and rest.endswith(".gate_proj.weight"):
            counts[path] = counts.get(path, 0) + 1
    for path, number in counts.items():
        inner, hidden = shapes[f"{path}.{MODULE}.0.gate_proj.weight"]
        found[f"{path}.{MODULE}"] = ExpertSizes(number, hidden, inner)
    for name, shape in shapes.items():
        path, end, rest = name.rpartition(f".{MODULE}.{PARAMETERS[0]}")
        down = shapes.get(f"{path}.{MODULE}.{PARAMETERS[1]}")
        if end and not rest and down is not None:
            # [E, 2 inner, hidden] and [E, hidden, inner], or the last two of each exchanged.
            inner = sum(shape[1:]) - sum(down[1:])
            found[f"{path}.{MODULE}"] = ExpertSizes(shape[0], sum(down[1:]) - inner, inner)
    return found


def chosen_experts(layers: Iterable[str], config: LoraConfig, section: str = "lora") -> list[str]:
    """Those of the modules of experts that lora.target_parameters names, sorted.

    An entry is a parameter's path or the end of it, as in PEFT. Raises ModelError for an entry that matches
    nothing, and for one of a module's two parameters without the other, which vLLM does not serve.
    """
    named = {f"{path}.{name}": path for path in layers for name in PARAMETERS}
    chosen = set()
    for entry in config.target_parameters:
        matching = {name for name in named if name == entry or name.endswith(f".{entry}")}
        if not matching:
            raise ModelError(
                f"{section}.target_parameters names {entry!r}, which matches no expert weights of the model.",
                f"Use {BOTH}." if named else "Leave it out: skylite finds no experts that can have LoRA.",
            )
        chosen |= matching
    for path in sorted({named[name] for name in chosen}):
        if missing := [name for name in PARAMETERS if f"{path}.{name}" not in chosen]:
            raise ModelError(
                f"{section}.target_parameters={config.target_parameters} leaves out {missing[0]} of {path}, "
                f"and vLLM serves LoRA only on {' and '.join(PARAMETERS)} together.",
                f"Use {BOTH}.",
            )
    return sorted({named[name] for name in chosen})


def served_modules(modules: Sequence[str], parameters: Sequence[str]) -> list[str]:
    """What an engine adapts: the modules, and the one of experts if their parameters have LoRA."""
    return [*modules, MODULE] if parameters else list(modules)


def module_of(path: str) -> str:
    """The module of experts whose matrices PEFT names by `path`; other paths stay."""
    module = path.removesuffix(BASE_LAYER)
    return module if is_experts(module) else path


def is_experts(path: str) -> bool:
    """Whether a path, or the path of a matrix in PEFT's files, leads to experts."""
    return path.removesuffix(BASE_LAYER).rpartition(".")[2] == MODULE


def peft_names(path: str) -> tuple[str, ...]:
    """The names of a module of experts by which PEFT and vLLM look up its rank and alpha in patterns."""
    return (path, path + BASE_LAYER, *(f"{path}.{name}" for name in PARAMETERS))
