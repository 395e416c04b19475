"""Model names to checked local folders."""

from skylite.models.lora_modules import likely_target_modules
from skylite.models.resolve import ResolvedModel, resolve_model

__all__ = ["ResolvedModel", "likely_target_modules", "resolve_model"]
