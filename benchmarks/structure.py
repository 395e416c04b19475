"""How does a checkout look to a newcomer? Counts files, functions, imports and phrases of its src/skylite.

    python benchmarks/structure.py CHECKOUT
    python benchmarks/structure.py . --trace

CHECKOUT's code is parsed, never imported. --trace follows the samples of one tiny step, from the rollout file
to the optimizer, through the code of this checkout.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from command_line import argument_parser

SMALL_FILE = 40
MAX_COLUMNS = 110
STIFF = (
    "is said", "are said", "is told", "are told", "goes on", "go on", "whole", "proven", "for want of",
    "so often", "our way", "left alone", "leaves alone", "laid ready", "mend", "mends", "mended", "anew",
    "heed", "likewise", "thereby", "hence", "at hand", "in the place of", "is that of", "comes to", "lest",
)  # fmt: skip
PRAGMA = re.compile(r"  # (type: ignore|noqa).*")
TEXTS = ("src/**/*.py", "docs/**/*.md", "*.md", "benchmarks/*.md")
"""Where lines and phrases are counted."""


def main() -> None:
    args = parse_arguments()
    found = measure(args.checkout.resolve())
    if args.trace:
        found["one step visits"] = trace_step()
    print(json.dumps(found, indent=1))


def parse_arguments() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--trace", action="store_true")
    return parser.parse_args()


def measure(root: Path) -> dict[str, Any]:
    """Everything that needs no run of the code."""
    source = root / "src" / "skylite"
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(source.rglob("*.py"))}
    functions = sorted((lines, name) for path in trees for name, lines in functions_of(trees[path]))
    texts = [p for pattern in TEXTS for p in root.glob(pattern)]
    lines = [line for p in texts for line in p.read_text(encoding="utf-8").splitlines()]
    files = [p for p in trees if p.name != "__init__.py"]
    importers = imports_of_modules(source, trees)
    return {
        "files per folder": dict(Counter(str(p.parent.relative_to(source)) for p in files)),
        f"files under {SMALL_FILE} lines with at most one importer": sorted(
            str(p.relative_to(source))
            for p in files
            if len(p.read_text().splitlines()) < SMALL_FILE and len(importers[module_of(source, p)]) <= 1
        ),
        "median function, lines": statistics.median(count for count, _ in functions),
        "longest function, lines": functions[-1],
        "imports in a circle of folders": upward_imports(source, importers),
        f"lines over {MAX_COLUMNS}": sum(map(is_long, lines)),
        "stiff phrases": stiff_phrases("\n".join(lines)),
    }


def functions_of(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Name and lines of each function, without decorators."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or node.lineno) - node.lineno + 1


def module_of(source: Path, path: Path) -> str:
    return ".".join(["skylite", *path.relative_to(source).with_suffix("").parts]).removesuffix(".__init__")


def imports_of_modules(source: Path, trees: dict[Path, ast.Module]) -> dict[str, set[Path]]:
    """Each module of the package, and the files that import it or a name of it."""
    importers: dict[str, set[Path]] = {module_of(source, path): set() for path in trees}
    for path, tree in trees.items():
        for name in imported_names(tree):
            known = name if name in importers else name.rpartition(".")[0]
            if known in importers:
                importers[known].add(path)
    return importers


def imported_names(tree: ast.AST) -> Iterator[str]:
    """Dotted names; for `from a import b` both a.b and, if b is no module, a (see imports_of_modules)."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def upward_imports(source: Path, importers: dict[str, set[Path]]) -> int:
    """Imports between folders of one circle. 0: there is an order of the folders in which all run down."""
    arrows = Counter(
        (path.relative_to(source).parts[0].removesuffix(".py"), module.split(".")[1])
        for module, paths in importers.items()
        for path in paths
        if "." in module
    )
    edges = {(a, b) for a, b in arrows if a != b}
    reach = set(edges)
    while more := {(a, d) for a, b in reach for c, d in edges if b == c} - reach:
        reach |= more
    return sum(arrows[a, b] for a, b in edges if (b, a) in reach)


def is_long(line: str) -> bool:
    """Over the limit, beside comments that tools read. A table's row cannot be broken."""
    return len(PRAGMA.sub("", line)) > MAX_COLUMNS and not line.startswith("|")


def stiff_phrases(text: str) -> dict[str, int]:
    counts = {p: len(re.findall(rf"\b{p}\b", text, re.IGNORECASE)) for p in STIFF}
    return {phrase: count for phrase, count in counts.items() if count}


class Visits:
    """A profiler: the files of the package that Python enters, and from which file."""

    def __init__(self, source: Path) -> None:
        self.source = f"{source}/"
        self.files: list[str] = []
        """In the order of their first call."""
        self.returns: set[tuple[str, str]] = set()
        """(from, to): calls into a file that was visited before."""

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(self.source) or frame.f_code.co_name == "<module>":
            return
        caller = frame.f_back
        while caller is not None and not caller.f_code.co_filename.startswith(self.source):
            caller = caller.f_back
        start = caller.f_code.co_filename if caller is not None else ""
        if name not in self.files:
            self.files.append(name)
        elif start not in ("", name):
            self.returns.add((start, name))

    def summary(self) -> dict[str, Any]:
        names = [name.removeprefix(self.source) for name in self.files]
        return {
            "folders": sorted({str(Path(name).parent) for name in names}),
            "files": names,
            "returns": len(self.returns),
        }


def traced(run: Callable[[], object], visits: Visits) -> None:
    sys.setprofile(visits)
    try:
        run()
    finally:
        sys.setprofile(None)


def trace_step() -> dict[str, Any]:
    """Read a rollout file of a tiny model and train on it, as a rank does."""
    import skylite
    from skylite.run.rollout_file import read_rollouts
    from skylite.trainer.step import train_step
    from tests.cases import optimizer_of, policy_of
    from tests.rows import random_samples, write_samples
    from tests.small_run import lone_rank, settings
    from tests.tiny_models import make_tiny_model

    visits, config = Visits(Path(str(skylite.__file__)).parent), settings()
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder, lone_rank() as dist:
        path = Path(folder) / "step-000001.parquet"
        write_samples(path, random_samples(0))
        policy = policy_of(make_tiny_model(Path(folder) / "model"), config, dist)
        optimizer = optimizer_of(policy, config)
        traced(lambda: train_step(policy, optimizer, read_rollouts(path), 1, config, dist), visits)
    return visits.summary()


if __name__ == "__main__":
    main()
