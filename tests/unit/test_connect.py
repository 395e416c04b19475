"""skylite.connect: Tinker's client with an address, or a sentence."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import pytest

import skylite
from skylite.errors import ConfigError


def test_the_client_gets_address_and_key(monkeypatch: pytest.MonkeyPatch):
    made: list[dict[str, Any]] = []
    client = SimpleNamespace(ServiceClient=lambda **words: made.append(words))
    monkeypatch.setitem(sys.modules, "tinker", client)
    monkeypatch.setenv("SKYLITE_API_KEY", "tml-first, tml-second")
    skylite.connect("http://127.0.0.1:8000")
    skylite.connect("http://127.0.0.1:8000", "tml-own")
    assert made == [
        {"base_url": "http://127.0.0.1:8000", "api_key": "tml-first"},
        {"base_url": "http://127.0.0.1:8000", "api_key": "tml-own"},
    ]


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SKYLITE_API_KEY", raising=False)
    monkeypatch.setitem(sys.modules, "tinker", None)
    with pytest.raises(ConfigError, match="needs the API key"):
        skylite.connect("http://127.0.0.1:8000")
    with pytest.raises(ConfigError, match=r"tinker is not installed. Install it: pip install tinker==0.38.0"):
        skylite.connect("http://127.0.0.1:8000", "tml-own")
    with pytest.raises(ConfigError, match="Forward a port"):
        skylite.connect("unix:/tmp/a.sock", "tml-own")
