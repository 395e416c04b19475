"""Chat templates and conversations: are the trained ids the ones that the engine was given and sampled?

    python benchmarks/template_ids.py --out benchmarks/results/template_ids_cpu.json

The conversations of tests/unit/template_conversations.py run over HTTP against the OpenAI server. A stand-in
for vLLM samples replies in each model's notation, in tokens that its tokenizer would not choose. Each call's
ids are read back from the packed tree that the trainer computes. `branches` counts the calls that do not
continue an earlier one. Exit code 1 if a call's ids differ.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from command_line import argument_parser
from machine_info import machine_info

from skylite.run.files import write_json
from tests.unit.template_cases import FAMILIES
from tests.unit.template_conversations import CONVERSATIONS, Refused
from tests.unit.test_template_families import branches, hold, trained

HISTORIES = ("sampled", "template")


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows = [
        compare(number, conversation, history)
        for history in HISTORIES
        for conversation in CONVERSATIONS
        for number in range(len(FAMILIES))
    ]
    summaries = [summary([row for row in rows if row["history"] == history]) for history in HISTORIES]
    for found in summaries:
        print("env.history={history}: {equal} of {calls} calls equal, in {compared} pairs of {templates} "
              "templates and {conversations} conversations; refused: {refused}".format(**found))  # fmt: skip
        for name, of_templates in found["branches"].items():
            print(f"    {name}: " + (", ".join(f"{t} {n}" for t, n in of_templates.items()) or "none"))
    if args.out is not None:
        write_json(args.out, {**machine_info(), "summaries": summaries, "rows": rows})
    sys.exit(any(found["equal"] < found["calls"] for found in summaries))


def compare(number: int, conversation: Any, history: str) -> dict[str, Any]:
    """One template in one conversation."""
    about = {"template": FAMILIES[number].name, "conversation": conversation.__name__, "history": history}
    try:
        engine, log = hold(number, conversation, history)
    except Refused as error:
        return {**about, "refused": str(error)}
    with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
        found = trained(log, Path(folder) / "rollouts.parquet")
    equal = sum(ours == theirs for ours, theirs in zip(found, engine.calls, strict=True))
    return {**about, "calls": len(engine.calls), "equal": equal, "branches": branches(log)}


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Counts over the rows, and for each conversation the templates with branches."""
    compared = [row for row in rows if "refused" not in row]
    return {
        "history": rows[0]["history"],
        "templates": len({row["template"] for row in rows}),
        "conversations": len({row["conversation"] for row in rows}),
        "compared": len(compared),
        "refused": ", ".join(f"{r['template']} {r['conversation']}" for r in rows if "refused" in r)
        or "none",
        "calls": sum(row["calls"] for row in compared),
        "equal": sum(row["equal"] for row in compared),
        "branches": {
            name: {
                row["template"]: row["branches"]
                for row in compared
                if row["conversation"] == name and row["branches"]
            }
            for name in dict.fromkeys(row["conversation"] for row in rows)
        },
    }


if __name__ == "__main__":
    main()
