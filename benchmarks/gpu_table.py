"""Puts the results of `make gpu-check` into a page, as tables between two markers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- gpu-check: begin -->", "<!-- gpu-check: end -->"
NOT_RUN = "not run"
OPERATIONS = 8
"""Rows of the profile that the page shows; the result file has more."""


def write_table(page: Path, results: dict[str, Any]) -> None:
    """Replace the text between the markers of `page`. Raises ValueError if they are missing."""
    text = page.read_text(encoding="utf-8")
    before, found_begin, rest = text.partition(BEGIN)
    _, found_end, after = rest.partition(END)
    if not (found_begin and found_end):
        raise ValueError(f"{page} lacks the lines {BEGIN} and {END}; add them where the tables belong")
    page.write_text(f"{before}{BEGIN}\n{tables(results)}\n{END}{after}", encoding="utf-8")


def tables(results: dict[str, Any]) -> str:
    """All tables as Markdown. A dry run counts as not run: its numbers are those of tiny models."""
    parts = {} if results.get("dry_run") else results.get("parts", {})
    if not parts:
        return "\n`make gpu-check` has not run on a GPU.\n"
    blocks = [
        machine_line(results),
        table(("part", "result"), [[name, outcome(parts[name])] for name in parts]),
        table(
            ("model", "attention", "checkpointing", "packing", "tokens/s", "MFU", "peak GiB"),
            train_rows(parts),
        ),
        table(("profile of 7B: operation", "ms", "calls", "share"), profile_rows(parts)),
        table(("out of memory: step", "tokens per micro-batch after it", "result"), memory_rows(parts)),
        table(("kernels", "keys", "first call, ms", "later, ms"), kernel_rows(parts)),
        table(("loop", "value"), loop_rows(parts)),
    ]
    return "\n" + "\n\n".join(blocks) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; without rows, one row that says so."""
    rows = rows or [[NOT_RUN, *[""] * (len(head) - 1)]]
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines)


def machine_line(results: dict[str, Any]) -> str:
    """One sentence: device, versions, commit and date."""
    versions = results.get("versions", {})
    names = ", ".join(f"{n} {versions[n]}" for n in ("torch", "transformers", "vllm") if n in versions)
    gpus = ", ".join(results.get("gpus", [])) or "no GPU"
    return f"{gpus}; {names}.\nCommit {results.get('commit')}, {results.get('date')}."


def outcome(part: dict[str, Any] | None) -> str:
    """How a part ended, in one cell."""
    if part is None:
        return NOT_RUN
    found = part.get("found", {})
    reason = part.get("reason") or found.get("skipped") or found.get("flex_gradient", {}).get("failed", "")
    status = "skipped" if found.get("skipped") else part["status"]
    return f"{status}, {part['seconds']} s" + (f": {short(reason)}" if reason else "")


def train_rows(parts: dict[str, Any]) -> list[list[Any]]:
    """A row for each mode of each shape."""
    rows = []
    for part in (p for name, p in parts.items() if name.startswith("train ")):
        found = part.get("found", {})
        for row in found.get("rows", []):
            mode = [found.get("shape"), row["attention"], row["checkpointing"]]
            mode.append(row.get("packing", row["packing_wanted"]))
            failed, peak = short(row.get("failed", "")), row.get("peak_gib", "")
            if not row.get("seconds"):
                rows.append([*mode, failed, "", peak])
                continue
            rate = f"{round(row['tokens_total'] / row['seconds'][-1]):,}"
            rows.append([*mode, f"{rate}, then {failed}" if failed else rate, f"{row['mfu']:.3g}", peak])
    return rows


def profile_rows(parts: dict[str, Any]) -> list[list[Any]]:
    """The operations that take most of a micro-batch at 7B's shape."""
    found = parts.get("profile 7b", {}).get("found", {})
    return [
        [f"`{short(row['name'])}`", row["ms"], row["calls"], f"{row['ms'] / 1e3 / found['busy_s']:.1%}"]
        for row in found.get("operations", [])[:OPERATIONS]
    ]


def memory_rows(parts: dict[str, Any]) -> list[list[Any]]:
    """What steps with too little memory did."""
    steps = parts.get("out of memory", {}).get("found", {}).get("steps", [])
    return [[s["step"], s["tokens_per_micro_batch"], memory_result(s)] for s in steps]


def memory_result(step: dict[str, Any]) -> str:
    """How such a step ended, in one cell."""
    if step["grad_norm"] is None:
        return short(step["anomaly"] or "no gradient")
    how = (
        f"computed again after {count} warning(s)" if (count := len(step["warnings"])) else "computed at once"
    )
    return f"{how}, gradient norm {step['grad_norm']:.3g}"


def kernel_rows(parts: dict[str, Any]) -> list[list[Any]]:
    """A row for each shape, forward and backward together."""
    flex = [
        (f"flex, {r['heads']} heads, {r['dtype']}{', softcap' if r['softcap'] else ''}", r["queries"], r)
        for r in parts.get("flex", {}).get("found", {}).get("rows", [])
    ]
    sdpa = [
        (f"{'with' if r['cudnn'] else 'without'} cuDNN, {r['queries']} queries", r["keys"], r)
        for r in parts.get("attention", {}).get("found", {}).get("rows", [])
    ]
    return [
        [name, keys, *([short(r["failed"]), ""] if "failed" in r else [r["first_ms"], r["ms"]])]
        for name, keys, r in [*flex, *sdpa]
    ]


def loop_rows(parts: dict[str, Any]) -> list[list[Any]]:
    """Choices, canary gaps and restarts of the loop, and Liger's times."""
    found = parts.get("loop", {}).get("found", {})
    rows: list[list[Any]] = [["choice", short(choice)] for choice in found.get("choices", [])]
    for step in found.get("steps", []):
        gaps = ", ".join(f"{k} {v:.3g}" for k, v in step.items() if k.startswith("canary/"))
        rows.append([f"step {step.get('step')}", f"{step.get('time/step_s', 0):.1f} s; {gaps}"])
    if "restarts" in found:
        rows.append(["restarts after the engine was killed", found["restarts"]])
    if "resume" in found:
        rows.append(["one more step with `--resume`", short(found["resume"])])
    liger = parts.get("liger", {}).get("found", {})
    names = {"off": "skylite's kernels", "on": f"Liger {liger.get('version', '')}".strip()}
    return rows + [[name, liger[key]] for key, name in names.items() if key in liger]


def short(text: str) -> str:
    """The first line, at most 60 characters, safe in a table."""
    line = text.strip().partition("\n")[0].replace("|", "/")
    return line if len(line) <= 60 else line[:57] + "..."
