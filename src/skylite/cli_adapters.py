"""The commands about published adapters: adapters list, verify, gc."""

from __future__ import annotations

from skylite.cli_help import Commands
from skylite.cli_options import AsJson, RunFolder, Verbose

adapters_app = Commands(
    "Commands", help="List, verify or clean up the published adapters of a run.", no_args_is_help=True
)


@adapters_app.command("verify")
def adapters_verify(target: RunFolder, as_json: AsJson = False, verbose: Verbose = None) -> None:
    """Check every published adapter against its hashes. Exits 1 if one is damaged."""
    from skylite.commands.adapters import verify

    verify(target, as_json=as_json)


@adapters_app.command("list")
def adapters_list(target: RunFolder, as_json: AsJson = False, verbose: Verbose = None) -> None:
    """List the published adapters: version, step, bytes, age, canary gap."""
    from skylite.commands.adapters import list_versions

    list_versions(target, as_json=as_json)


@adapters_app.command("gc")
def adapters_gc(target: RunFolder, as_json: AsJson = False, verbose: Verbose = None) -> None:
    """Delete old adapters and checkpoints. Removes what the keep rules do not need, and unfinished files."""
    from skylite.commands.adapters import gc

    gc(target, as_json=as_json)
