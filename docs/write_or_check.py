"""For scripts that make pages from the code: write the pages or, with --check, find the stale ones."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def write_or_check(pages: Mapping[Path, str], about: str | None) -> None:
    """The command line of such a script. Exits 1 with --check if a file does not hold its page."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, and fail if a page is stale")
    if parser.parse_args().check:
        sys.exit(stale_text(pages) or 0)
    for path, text in pages.items():
        path.write_text(text, encoding="utf-8")
        print(f"wrote {path}")


def with_section(page: Path, name: str, text: str) -> dict[Path, str]:
    """The page with this text between its comments `NAME: begin` and `NAME: end`."""
    begin, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    before, _, rest = page.read_text(encoding="utf-8").partition(begin)
    return {page: f"{before}{begin}\n\n{text}\n\n{end}{rest.partition(end)[2]}"}


def stale_text(pages: Mapping[Path, str]) -> str:
    """Which pages are stale and what to do, in one sentence; empty if none is."""
    stale = [path for path, text in pages.items() if not path.exists() or path.read_text("utf-8") != text]
    names = " and ".join(path.relative_to(ROOT).as_posix() for path in stale)
    return f"The code has changed, and {names} not with it: run `make docs-reference`." if stale else ""
