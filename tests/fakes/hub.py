"""A local server that speaks what huggingface_hub needs of the hub to create a repository and to commit.

Files over 100 bytes go through LFS, as the hub asks for weights. `Hub.refuse` answers a path with an error.
"""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

LFS_BYTES = 100
TOKEN = "hf_test"


@dataclass
class Hub:
    """What the server was given."""

    url: str = ""
    repos: dict[str, bool] = field(default_factory=dict)
    """Name -> whether it is private."""
    files: dict[str, bytes] = field(default_factory=dict)
    """Committed path -> content."""
    commits: list[str] = field(default_factory=list)
    """Summaries."""
    uploads: dict[str, bytes] = field(default_factory=dict)
    """sha256 -> content of LFS uploads."""
    refuse: dict[str, tuple[int, str]] = field(default_factory=dict)
    """Part of a path -> status and message to answer."""

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{body['organization']}/{body['name']}"
        self.repos[name] = body.get("private", False) or body.get("visibility") == "private"
        return {"url": f"{self.url}/{name}", "name": name, "id": name}

    def preupload(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "lfs" if file["size"] > LFS_BYTES else "regular",
                    "shouldIgnore": False,
                }
                for file in body["files"]
            ]
        }

    def batch(self, body: dict[str, Any]) -> dict[str, Any]:
        return {
            "transfer": "basic",
            "objects": [
                {**o, "actions": {"upload": {"href": f"{self.url}/upload/{o['oid']}", "header": {}}}}
                for o in body["objects"]
            ],
        }

    def commit(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            else:
                assert line["key"] == "lfsFile"
                self.files[value["path"]] = self.uploads[value["oid"]]
        return {"commitUrl": f"{self.url}/me/mine/commit/abc", "commitOid": "abc", "success": True}


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one client of `hub`."""

    hub: ClassVar[Hub]
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def read(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def do_PUT(self) -> None:
        content = self.read()
        digest = self.path.rpartition("/")[2]
        assert hashlib.sha256(content).hexdigest() == digest
        self.hub.uploads[digest] = content
        self.answer(200, {})

    def do_POST(self) -> None:
        content = self.read()
        for part, (status, message) in self.hub.refuse.items():
            if part in self.path:
                self.answer(status, {"error": message})
                return
        if self.headers.get("Authorization") != f"Bearer {TOKEN}":
            self.answer(401, {"error": "Invalid credentials"})
        elif self.path.endswith("/commit/main"):
            self.answer(200, self.hub.commit([json.loads(line) for line in content.splitlines() if line]))
        else:
            self.answer(200, self.reply(json.loads(content)))

    def reply(self, body: dict[str, Any]) -> dict[str, Any]:
        if self.path == "/api/repos/create":
            return self.hub.create(body)
        if self.path == "/api/validate-yaml":
            return {"errors": [], "warnings": []}
        return self.hub.batch(body) if self.path.endswith("/objects/batch") else self.hub.preupload(body)

    def answer(self, status: int, body: dict[str, Any]) -> None:
        content = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)


@contextmanager
def fake_hub() -> Iterator[Hub]:
    """A running hub on a free port of 127.0.0.1."""
    hub = Hub()
    handler = type("HubHandler", (Handler,), {"hub": hub})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
