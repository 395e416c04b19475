"""Which modules PEFT adapts: those that an adapter names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exactly_these_modules() -> Iterator[None]:
    """Keep PEFT from choosing other modules than named, where it makes or loads an adapter.

    In models such as DeepSeek-V3 and GLM-4.5 PEFT 0.21 takes the gate_proj of a dense MLP or a shared expert
    for the experts' of transformers 4, and adapts the experts' parameters in its place.
    """
    from peft.utils import transformers_weight_conversion as conversion

    convert = conversion.convert_peft_config_for_transformers
    conversion.convert_peft_config_for_transformers = lambda *_, **__: None
    try:
        yield
    finally:
        conversion.convert_peft_config_for_transformers = convert
