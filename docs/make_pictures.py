"""Draw the picture of watch from a run; with a second run those of doctor, report and compare, too.

    python docs/make_pictures.py RUN [OTHER]

Those of the report need chromium.
"""

from __future__ import annotations

import io
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from skylite.cli.report import report
from skylite.cli.watch import Watcher
from skylite.ui.live_panel import LivePanel

DOCS = Path(__file__).parent
COLUMNS, ROWS = 100, 32
WINDOW = "1100,1000"


def main(run: Path, other: Path | None = None) -> None:
    console = recorder(ROWS)
    console.print(LivePanel(Watcher(run).state(has_keys=True), fills_screen=True))
    console.save_svg(str(DOCS / "watch.svg"), title="skylite watch runs/NAME")
    if other is not None:
        draw_doctor()
        draw_report(DOCS / "report.png", [run])
        draw_report(DOCS / "compare.png", [run, other])


def recorder(rows: int | None = None) -> Console:
    return Console(
        record=True,
        width=COLUMNS,
        height=rows,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )


def draw_doctor() -> None:
    """Draw what doctor prints in an empty home folder, which stands in the picture as ~."""
    with tempfile.TemporaryDirectory() as home:
        env = {**os.environ, "HOME": home, "TMPDIR": home, "PYTHONPATH": str(DOCS.parent / "src")}
        command = [sys.executable, "-c", "from skylite.cli.main import main; main()", "doctor"]
        done = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, check=False)
    console = recorder()
    text = done.stdout.replace(home, "~").replace(sys.prefix, "~/skylite/.venv")
    console.print(text, highlight=False, markup=False, end="")
    console.save_svg(str(DOCS / "doctor.svg"), title="skylite doctor")


def draw_report(picture: Path, runs: list[Path]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        report(runs, out=page, completions=100)
        look = ["--hide-scrollbars", f"--window-size={WINDOW}", "--virtual-time-budget=3000"]
        browser = ["chromium", "--headless", "--no-sandbox", f"--user-data-dir={folder}/profile"]
        subprocess.run([*browser, *look, f"--screenshot={picture}", page.as_uri()], check=True)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
