"""The page of `skylite report`: one HTML file without network access.

A run may be a stranger's. The page shows its strings as text nodes only, the embedded JSON cannot end its
script element, and a content security policy allows no script but ours, by hash, and no request at all.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

SCRIPTS = ("uPlot-1.6.32.min.js", "plots.js", "samples.js", "page.js")
STYLES = ("uPlot-1.6.32.min.css", "page.css")
GENERATOR = "skylite report"
"""Marks a page of ours, which a new report may replace."""


def page_html(data: Mapping[str, Any], mark: str = "") -> str:
    """The page. `data` comes from page_data.py. `mark` tells it from pages about other runs."""
    script = "\n".join(map(_asset, SCRIPTS))
    style = "\n".join(map(_asset, STYLES))
    title = "skylite: " + ", ".join(run["label"] for run in data["runs"])
    policy = (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": escape(policy),
        "generator": GENERATOR,
        "mark": mark,
        "title": escape(title),
        "style": style,
        "script": script,
        "data": script_json(data),
    }
    # In one pass, because a run's name may look like a mark.
    return re.sub(r"\{\{(\w+)\}\}", lambda mark: parts[mark.group(1)], _asset("page.html"))


def script_json(data: Any) -> str:
    """JSON for a script element: without the characters that begin a tag, a comment or an entity."""
    text = json.dumps(data, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _hash(text: str) -> str:
    """The source expression of an inline element with exactly this text."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _asset(name: str) -> str:
    return files("skylite.report").joinpath("page", name).read_text(encoding="utf-8")
