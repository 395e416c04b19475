"""An HTTP server in a thread that answers by a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Answer = tuple[int, dict[str, str], str]
"""Status, headers, body."""


@contextmanager
def serving(answer: Callable[[str, Any, dict[str, str]], Answer]) -> Iterator[str]:
    """Serve (path, body of a POST or None, headers in lower case) -> answer. Yields the URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.reply(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def do_GET(self) -> None:
            self.reply(None)

        def reply(self, body: Any) -> None:
            status, headers, text = answer(self.path, body, {k.lower(): v for k, v in self.headers.items()})
            data = text.encode()
            self.send_response(status)
            for name, value in (headers | {"Content-Length": str(len(data))}).items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 128  # as many as a client may open at once; more are refused

    server = Server(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
