"""The episodes that come with skylite; env.episode names them without a path."""

BUILT_IN = ("guess", "calculator", "reasoning-gym")
"""Module names in this folder, with a hyphen for an underscore. Each has a function `episode`."""
