"""The reward of a sorted list."""


def score(completion, answer):
    """The share of numbers in the right place; the reference answer scores 1.0."""
    wanted, given = answer.split(), completion.split()
    right = sum(a == b for a, b in zip(wanted, given, strict=False))
    return right / max(len(wanted), len(given))
