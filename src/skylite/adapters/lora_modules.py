"""Names of the modules that get LoRA: patterns, and the short forms that adapter_config.json and vLLM take."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def matches(name: str, patterns: Sequence[str]) -> bool:
    """A pattern is a module name (the end of the path) or a regular expression for the whole path."""
    return any(name == p or name.endswith(f".{p}") or re.fullmatch(p, name) is not None for p in patterns)


def short_names(modules: Iterable[str], chosen: Iterable[str]) -> list[str]:
    """`chosen`, full paths, sorted: the last name component where it selects exactly the chosen of all `modules`, else the full path."""
    chosen = set(chosen)
    unsure = {name.rpartition(".")[2] for name in modules if name not in chosen}
    return sorted({suffix if (suffix := name.rpartition(".")[2]) not in unsure else name for name in chosen})
