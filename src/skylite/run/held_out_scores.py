"""The held-out scores that a run measured of its own adapters: evals/LABEL-vVERSION.json."""

from __future__ import annotations

from itertools import product
from typing import Literal, get_args

from skylite.config.checkpoint import EvalConfig
from skylite.errors import DataError
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir, numbered_paths
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

Label = Literal["before", "step", "after"]
"""When a run evaluates on held-out problems."""


def write_score(
    run: RunDir, label: Label, version: int, mean: float, config: EvalConfig, *, is_binary: bool
) -> None:
    """Record a held-out score of the run, next to the parquet file with its completions."""
    facts = {"mean": mean, "is_binary": is_binary, "version": version}
    body = {**facts, "split": config.split, "limit": config.limit}
    write_json(run.evals / f"{label}-v{version:06d}.json", body)


def held_out_scores(run: RunDir, config: EvalConfig) -> dict[int, float]:
    """Version -> mean score, from the run's own evaluations on the problems of `config`.

    Raises DataError for a damaged file.
    """
    scores: dict[int, float] = {}
    results = [numbered_paths(run.evals, f"{label}-v", ".json").values() for label in get_args(Label)]
    for path in (p for paths in results for p in paths):
        try:
            body = parse_json(read_text(path))
            if (body["split"], body["limit"]) == (config.split, config.limit):
                scores[int(body["version"])] = float(body["mean"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is not a valid held-out result: {type(error).__name__} {error}.", "Remove that file."
            ) from None
    return scores


def scores_are_binary(run: RunDir) -> bool:
    """Whether all held-out scores of the run are 0 or 1, so that their means are accuracies."""
    files = [numbered_paths(run.evals, f"{label}-v", ".json").values() for label in get_args(Label)]
    for path in (p for paths in files for p in paths):
        try:
            if parse_json(read_text(path)).get("is_binary") is not True:
                return False
        except (OSError, ValueError, AttributeError):
            return False
    return True


def remove_scores_after(run: RunDir, version: int) -> None:
    """Delete the run's own evaluations of versions after `version`."""
    for label, suffix in product(get_args(Label), (".json", ".parquet")):
        for found, path in numbered_paths(run.evals, f"{label}-v", suffix).items():
            if found > version:
                path.unlink()
