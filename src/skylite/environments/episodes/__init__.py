"""The episodes that come with skylite; env.episode names them without a path."""

BUILT_IN = ("guess", "calculator")
"""Module names in this folder. Each has a function `episode`."""
