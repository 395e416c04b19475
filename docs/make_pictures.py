"""Draw docs/watch.svg and docs/report.png from a run. The second needs chromium.

python docs/make_pictures.py RUN
"""

from __future__ import annotations

import io
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console

from skylite.commands.report import report
from skylite.commands.watch import Watcher
from skylite.ui.watch_panel import WatchPanel

DOCS = Path(__file__).parent
COLUMNS, ROWS = 100, 32
WINDOW = "1100,1000"


def main(run: Path) -> None:
    console = Console(
        record=True,
        width=COLUMNS,
        height=ROWS,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(WatchPanel(Watcher(run).state(has_keys=True)))
    console.save_svg(str(DOCS / "watch.svg"), title="skylite watch runs/NAME")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        report([run], out=page, png=None, max_completions=100)
        look = ["--hide-scrollbars", f"--window-size={WINDOW}", "--virtual-time-budget=3000"]
        browser = ["chromium", "--headless", "--no-sandbox", f"--user-data-dir={folder}/profile"]
        picture = f"--screenshot={DOCS / 'report.png'}"
        subprocess.run([*browser, *look, picture, page.as_uri()], check=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
