"""Check this machine: versions, GPUs, memory, disks, network. Also limits and dead runs.

Each problem comes with its remedy. Exits 1 if a check fails.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.options import AsJson, Verbose
from skylite.doctor import checks
from skylite.doctor.checks import Finding, bad
from skylite.doctor.engine_probe import probe_engine
from skylite.errors import SkyliteError, error_line
from skylite.progress_reporting import long_work
from skylite.ui.logs import show

MARKS = {"ok": "ok  ", "note": "note", "bad": "BAD "}
Check = Callable[[], Finding | Iterable[Finding]]


def doctor(
    runs: Annotated[Path, typer.Option(help="Folder with runs, to find dead ones.")] = Path("runs"),
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Check a running engine instead, e.g. http://127.0.0.1:8000. Default: this machine.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """Print a line per check. Exits 1 if something must be fixed."""
    if engine is not None:
        findings = probe_engine(engine)
    else:
        findings = []
        todo = machine_checks(runs)
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


def machine_checks(runs: Path) -> list[tuple[str, Check]]:
    """Name and function of every check, the quick ones first."""
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache")
    hub = checks.ask_hub()
    return [
        ("python", checks.check_python),
        ("packages", checks.check_packages),
        ("vllm", checks.check_vllm),
        ("gpu", checks.check_gpus),
        ("triton", checks.check_triton),
        ("torchvision", checks.check_torchvision),
        ("memory", checks.check_memory),
        ("shared memory", checks.check_shared_memory),
        ("disk", lambda: checks.check_disks(Path.cwd(), home, Path(tempfile.gettempdir()))),
        ("open files", checks.check_open_files),
        ("processes", checks.check_processes),
        ("address space", checks.check_address_space),
        ("sandbox", checks.check_sandbox),
        ("clock", lambda: checks.check_clock(hub)),
        ("ports", checks.check_ports),
        ("isolation", checks.check_network),
        ("hub", lambda: checks.check_hub(hub)),
        ("runs", lambda: checks.check_runs(runs)),
        ("leftovers", checks.check_leftovers),
    ]


def results(name: str, check: Check) -> list[Finding]:
    """What a check found. A check that fails is a finding, too."""
    try:
        found = check()
    except SkyliteError as error:
        return [bad(name, error.what, error.hint)]
    except (OSError, ValueError) as error:
        return [bad(name, f"it could not be checked: {error_line(error)}", "correct what the message names")]
    return [found] if isinstance(found, Finding) else list(found)


def line(finding: Finding) -> str:
    """Such as `BAD  disk: 1 GiB free at /tmp`, with the remedy below."""
    text = f"{MARKS[finding.level]}  {finding.check}: {finding.text}"
    return f"{text}\n        -> {finding.fix}" if finding.fix else text
