"""`benchmarks/structure.py` counts what it says it counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = {
    "src/skylite/__init__.py": "",
    "src/skylite/engine/client.py": "from skylite.run.files import write\n\n\ndef ask():\n    return write\n",
    "src/skylite/run/files.py": "import skylite.engine.client\ndef write():\n    pass\n" + "# goes on\n" * 40,
    "src/skylite/run/lock.py": "from skylite.run import files\nfrom skylite.run.files import write\n",
    "README.md": f"The whole file.\n{'long ' * 30}\n|{'table' * 30}|\n",
    "CHANGELOG.md": f"{'short ' * 15}  # type: ignore[no-untyped-call]\n",
}  # fmt: skip


def test_a_checkout_is_counted_without_importing_it(tmp_path: Path) -> None:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    command = [sys.executable, "benchmarks/structure.py", str(tmp_path)]
    found = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert found == {
        "files per folder": {"engine": 1, "run": 2},
        "files under 40 lines with at most one importer": ["engine/client.py", "run/lock.py"],
        "median function, lines": 2.0,
        "longest function, lines": [2, "write"],
        "imports in a circle of folders": 2,
        "lines over 110": 1,
        "stiff phrases": {"goes on": 40, "whole": 1},
    }
