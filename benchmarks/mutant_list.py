"""The mutants of a file: one changed token or one removed call each, made with cosmic-ray's operators."""

from __future__ import annotations

import ast
import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Operator
from cosmic_ray.operators.provider import OperatorProvider

SWAPS = {
    "Binary": "Add_Sub Sub_Add Mul_Div Div_Mul FloorDiv_Mul Mod_Mul Pow_Mul RShift_LShift LShift_RShift "
    "BitOr_BitAnd BitAnd_BitOr",
    "Comparison": "Eq_NotEq NotEq_Eq Lt_LtE Lt_GtE LtE_Lt LtE_Gt Gt_GtE Gt_LtE GtE_Gt GtE_Lt "
    "Is_IsNot IsNot_Is",
    "Unary": "USub_UAdd Delete_USub Delete_Invert Delete_Not",
}
"""One or two others for each operator. All of cosmic-ray's would be 11, nearly all as easy to notice."""
OTHERS = (
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
)


class RemoveCall(Operator):  # type: ignore[misc]
    """Replaces a statement that only calls something by `pass`. cosmic-ray has no such operator."""

    def mutation_positions(self, node: Any) -> Iterator[tuple[Any, Any]]:
        if node.type == "simple_stmt" and node.children[0].type == "atom_expr":
            last = node.children[0].children[-1]
            if last.type == "trailer" and last.children[0].value == "(":
                yield node.children[0].start_pos, node.children[0].end_pos

    def mutate(self, node: Any, index: int) -> Any:
        call = node.children[0]
        prefix = call.get_first_leaf().prefix
        node.children[0] = parso.python.tree.Keyword("pass", call.start_pos, prefix=prefix)
        return node

    @classmethod
    def examples(cls) -> tuple[()]:
        return ()


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change of one file."""

    path: str
    """From the repository's root."""
    operator: str
    number: int
    """Which of the operator's places in the file."""
    line: int


def operators() -> dict[str, Operator]:
    """Name -> operator."""
    names = [f"Replace{kind}Operator_{swap}" for kind, swaps in SWAPS.items() for swap in swaps.split()]
    provider = OperatorProvider()
    return {name: provider[name]() for name in (*names, *OTHERS)} | {"RemoveCall": RemoveCall()}


def mutants_of(root: Path, path: str) -> list[Mutant]:
    """Every mutant of the file.

    Not those in annotations, which Python never evaluates here, and not the flags of `@dataclass(...)` and
    `ConfigDict(...)`: frozen, slots and the like guard against mistakes that mypy finds.
    """
    source = (root / path).read_text(encoding="utf-8")
    nodes, spans = list(ast_nodes(get_ast(source))), _left_out(source)
    found = []
    for name, operator in operators().items():
        starts = [start for node in nodes for start, _ in operator.mutation_positions(node)]
        found += [
            Mutant(path, name, number, start[0])
            for number, start in enumerate(starts)
            if not any(low <= start < high for low, high in spans)
        ]
    found = [mutant for mutant in found if _can_be_made(root, mutant)]
    return found


def mutated_source(root: Path, mutant: Mutant) -> str:
    """The file's text with the change."""
    source = (root / mutant.path).read_text(encoding="utf-8")
    text: str | None = mutate_code(source, operators()[mutant.operator], mutant.number)
    assert text is not None, "mutants_of counts the places in the same way"
    return text


def _can_be_made(root: Path, mutant: Mutant) -> bool:
    """cosmic-ray cannot replace the name of an exception with a dot, as in `except json.JSONDecodeError`."""
    if mutant.operator != "ExceptionReplacer":
        return True
    try:
        mutated_source(root, mutant)
    except AttributeError:
        return False
    return True


def changed_lines(source: str, mutated: str) -> tuple[str, str]:
    """What the change removes and adds."""
    lines = list(difflib.ndiff(source.splitlines(), mutated.splitlines()))
    before, after = ([line[2:].strip() for line in lines if line.startswith(mark)] for mark in ("- ", "+ "))
    return " ".join(before), " ".join(after)


def _left_out(source: str) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Start and end of each part of the file that is not changed."""
    nodes: list[ast.expr] = []
    for node in ast.walk(ast.parse(source)):
        nodes += [n for n in (getattr(node, "annotation", None), getattr(node, "returns", None)) if n]
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("dataclass", "ConfigDict"):
            nodes += [keyword.value for keyword in node.keywords]
    return [((n.lineno, n.col_offset), (n.end_lineno or 0, n.end_col_offset or 0)) for n in nodes]
