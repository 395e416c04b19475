"""Model names to checked local folders."""

from skylite.models.resolve import ResolvedModel, resolve_model

__all__ = ["ResolvedModel", "resolve_model"]
