"""What the sandbox of rewards and tools can do on this machine."""

from __future__ import annotations

from skylite.doctor.finding import Finding, note, ok
from skylite.errors import SkyliteError
from skylite.sandbox.landlock import OLDEST_FOR_WRITING
from skylite.sandbox.sandbox import Sandbox


def check_sandbox() -> Finding:
    """The sandbox starts, and which of its parts this kernel and container offer."""
    sandbox = Sandbox("skylite.sandbox.server:make_nothing", what="code of a model")
    try:
        sandbox.start()
        found = sandbox.protection
        has_folder = found is not None and found.landlock >= OLDEST_FOR_WRITING and _has_bounded_folder()
    except SkyliteError as error:
        return note("sandbox", error.what, error.hint)
    finally:
        sandbox.close()
    assert found is not None, "it has started"
    missing = [
        *([] if found.landlock else ["code in it can read what you can read (no Landlock)"]),
        *(
            []
            if found.landlock >= OLDEST_FOR_WRITING
            else ["no folder to write in (python_tool does not run)"]
        ),
        *([] if found.counts_threads else ["code in it starts no threads"]),
        *(
            []
            if has_folder or found.landlock < OLDEST_FOR_WRITING
            else ["code in it cannot delete its files"]
        ),
    ]
    if missing:
        fix = "use Linux 6.2 or newer; in a container, allow Landlock, user namespaces and seccomp listeners"
        return note("sandbox", f"works, but {', '.join(missing)}", fix)
    return ok("sandbox", "all parts: listed system calls only, Landlock, limits of threads and of files")


def _has_bounded_folder() -> bool:
    with Sandbox("skylite.sandbox.server:make_nothing", scratch=True) as sandbox:
        sandbox.start()
        return sandbox.protection is not None and sandbox.protection.has_bounded_folder
