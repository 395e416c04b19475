"""The `skylite` program. Until the import path is safe, it imports only what Python itself has imported."""

from skylite.processes.import_path import protect_imports


def main() -> None:
    """Run the command line."""
    protect_imports()
    from skylite.cli import main as run_command

    run_command()
