"""A client that is killed with a request in flight: `dying_client.py HOST PORT KEY PATH`, the body on stdin.

It sends the request and then, if there is an answer to come, asks for that. It reads no reply to the last
thing that it sends, says so, and waits for its end.
"""

from __future__ import annotations

import http.client
import json
import sys
import time

host, port, key, path = sys.argv[1:]
connection = http.client.HTTPConnection(host, int(port))
headers = {"X-API-Key": key}
connection.request("POST", f"/api/v1/{path}", sys.stdin.buffer.read(), headers)
if path != "create_session":
    reply = json.loads(connection.getresponse().read())
    connection.request("POST", "/api/v1/retrieve_future", json.dumps(reply), headers)
print("in flight", flush=True)
time.sleep(600)
