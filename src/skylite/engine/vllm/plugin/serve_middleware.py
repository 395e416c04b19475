"""What vLLM's server imports for `skylite serve`: the check of the key, and of who connects.

vLLM imports it before it chooses the HTTP protocol of its server, for which it has no flag.
"""

from __future__ import annotations

from uvicorn.config import HTTP_PROTOCOLS

from skylite.engine.vllm.plugin.api_key import RequireKey
from skylite.processes.own_peers import PROTOCOL

__all__ = ["RequireKey"]

HTTP_PROTOCOLS["auto"] = PROTOCOL
