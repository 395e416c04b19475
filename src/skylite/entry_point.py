"""The `skylite` program. Until the import path is safe, it imports only what Python itself has imported."""

from skylite.processes.import_path import protect_imports


def main() -> None:
    """Run the command line, with folders of its own for temporary files and compiled code."""
    protect_imports()
    from skylite.processes.streams import protect_streams

    protect_streams()
    from skylite.cli.main import guarded_main
    from skylite.processes.private_folders import use_private_folders

    guarded_main(use_private_folders)
