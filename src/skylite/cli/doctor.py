"""Check this machine: versions, GPUs, memory, disks, network. Also limits and the sandbox.

Each problem comes with its remedy. Exits 1 if a check fails.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from functools import partial

from skylite.cli.options import AsJson
from skylite.doctor import Finding, machine_checks, results
from skylite.progress_reporting import long_work
from skylite.ui.logs import show

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}


def doctor(as_json: AsJson = False) -> None:
    """Print a line per check. Exits 1 if something must be fixed."""
    findings, todo = list[Finding](), machine_checks()
    with long_work("checking this machine", total=len(todo)) as work:
        for name, check in todo:
            work.detail = partial(str, name)
            findings += results(name, check)
            work.advance()
    if as_json:
        show(json.dumps([asdict(finding) for finding in findings], indent=1))
    else:
        show("\n".join(line(finding) for finding in findings))
    if any(finding.level == "bad" for finding in findings):
        sys.exit(1)


def line(finding: Finding) -> str:
    """Such as `BAD  disk: 1 GiB free at /tmp`, with the remedy below."""
    text = f"{MARKS[finding.level]}  {finding.check}: {finding.text}"
    return f"{text}\n        -> {finding.fix}" if finding.fix else text
