"""Names of modules that get LoRA: match patterns, and the short names in adapter_config.json and vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module path matches a pattern: the end of the path, or a regex for the full path."""
    return any(name == p or name.endswith(f".{p}") or re.fullmatch(p, name) is not None for p in patterns)


def short_names(modules: Iterable[str], chosen: Iterable[str]) -> list[str]:
    """Shorten the full paths `chosen` to their last component where it is unambiguous; sorted.

    A component that also occurs in `modules` outside of `chosen` is ambiguous; those paths stay full.
    """
    chosen = set(chosen)
    ambiguous = {name.rpartition(".")[2] for name in modules if name not in chosen}
    return sorted(
        {suffix if (suffix := name.rpartition(".")[2]) not in ambiguous else name for name in chosen}
    )
