"""Random damage to files: nesting, huge integers, wrong types, truncation, random bytes."""

from __future__ import annotations

import json
import random
from copy import deepcopy
from typing import Any

import yaml

from tests.unit.bad_inputs import ODD_VALUES, toml_text

DEPTHS = (50, 900, 5000, 100_000)
TREE_KINDS = ("nesting", "huge integer", "wrong type", "removed")
BYTE_KINDS = ("truncated", "flipped", "random", "spliced")
YAML_VALUES = (
    "!!python/object/apply:os.system ['touch hit']",
    "!!python/name:os.system",
    "!!binary x",
    "!x y",
    "&a [*a]",
    "*missing",
    "{<<: {a: 1}}",
    "? {a: b}",
    "|9",
    ">-",
    "%YAML 9.9",
    "---",
    "1:30",
    "0o17",
    "2026-13-45",
    ".inf",
    "@x",
    "`x`",
    "[",
    "'",
)
"""What YAML has and JSON lacks."""
KINDS = (*TREE_KINDS, *BYTE_KINDS)


def damaged_bytes(chosen: random.Random, good: bytes, kind: str) -> bytes:
    """`good` with some bytes cut, changed, repeated or replaced."""
    at = chosen.randrange(len(good) + 1)
    some = chosen.randbytes(chosen.randint(1, 64))
    if kind == "truncated":
        return good[:at]
    if kind == "flipped":
        raw = bytearray(good)
        for _ in range(chosen.randint(1, 8)):
            raw[chosen.randrange(len(raw))] ^= 1 << chosen.randrange(8)
        return bytes(raw)
    if kind == "spliced":
        end = min(len(good), at + chosen.randint(1, 200))
        return good[:at] + chosen.choice([some, good[at:end] * 3, b"", b"\0" * 40]) + good[end:]
    return chosen.randbytes(chosen.randint(0, 4096))


def damaged_document(chosen: random.Random, tree: Any, kind: str) -> bytes:
    """A JSON file."""
    if kind in TREE_KINDS:
        return _damaged_tree(chosen, tree, kind).encode("utf-8", errors="surrogatepass")
    return damaged_bytes(chosen, json.dumps(tree).encode(), kind)


def damaged_toml(chosen: random.Random, tree: Any, kind: str) -> bytes:
    """A TOML file. Nested values are those of JSON, most of which are TOML, too."""
    if kind in ("wrong type", "removed"):
        changed = json.loads(_damaged_tree(chosen, tree, kind))
        return toml_text(changed if isinstance(changed, dict) else {}).encode("utf-8", errors="surrogatepass")
    good = toml_text(tree)
    if kind in ("nesting", "huge integer"):
        lines = good.split("\n")
        at = chosen.choice([i for i, line in enumerate(lines) if " = " in line])
        lines[at] = f"{lines[at].partition(' = ')[0]} = {_text(chosen, kind)}"
        return "\n".join(lines).encode()
    return damaged_bytes(chosen, good.encode(), kind)


def damaged_yaml(chosen: random.Random, tree: Any, kind: str) -> bytes:
    """A YAML file, or JSON, which is YAML too."""
    good = yaml.safe_dump(tree)
    if kind == "spliced" and chosen.random() < 0.5:
        lines = good.split("\n")
        at = chosen.randrange(len(lines))
        lines[at] = f"{lines[at].partition(':')[0]}: {chosen.choice(YAML_VALUES)}"
        return "\n".join(lines).encode()
    return (
        damaged_document(chosen, tree, kind)
        if kind in TREE_KINDS
        else damaged_bytes(chosen, good.encode(), kind)
    )


def _damaged_tree(chosen: random.Random, tree: Any, kind: str) -> str:
    """A JSON document with one to three damaged values."""
    tree = deepcopy(tree)
    marks: dict[str, str] = {}
    for number in range(chosen.randint(1, 3)):
        places = _places(tree)
        if not places:
            break
        node, key = chosen.choice(places)
        if kind == "removed":
            del node[key]
        elif kind == "wrong type":
            node[key] = deepcopy(chosen.choice(ODD_VALUES))
        else:
            node[key] = f"@damage{number}@"
            marks[f'"@damage{number}@"'] = _text(chosen, kind)
    text = json.dumps(tree)
    for mark, value in marks.items():
        text = text.replace(mark, value)
    return text


def _text(chosen: random.Random, kind: str) -> str:
    """A value that is nested deeply, or a number of up to 6,000 digits."""
    if kind == "huge integer":
        return chosen.choice(["", "-"]) + "9" * chosen.choice([10, 19, 20, 40, 400, 4299, 6000])
    depth = chosen.choice(DEPTHS)
    opened, closed = chosen.choice([("[", "]"), ('{"a":', "}"), ('[{"a":', "}]")])
    return opened * depth + "1" + (closed * depth if chosen.random() < 0.8 else "")


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every value below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, value in items for found in [(tree, key), *_places(value)]]
