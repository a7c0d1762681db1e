"""The proxy of the benchmarks passes everything on and counts it by request."""

import http.client
import http.server
import threading
import time
from collections.abc import Iterator

import pytest

from benchmarks.slow_link import BUCKET, Proxy


class Echo(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Echo)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    proxy = Proxy(server.server_address[1])
    yield proxy
    proxy.close()
    server.shutdown()
    server.server_close()


def test_bytes_are_counted_by_request(proxy: Proxy) -> None:
    """Two kinds of requests on one connection, bodies of several reads among them."""
    start, large = time.time(), b"POST /x" * 30_000
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port)
    for path, body in (("push-object", large), ("pull-messages", b"1"), ("push-object", b"23")):
        connection.request("POST", f"/v1/{path}", body)
        assert connection.getresponse().read() == body
    connection.close()
    found = proxy.requests(start, time.time())
    assert {name: count[0] for name, count in found.items()} == {"push-object": 2, "pull-messages": 1}
    for name, bodies in (("push-object", len(large) + 2), ("pull-messages", 1)):
        _, up, down = found[name]
        assert bodies < up < bodies + 1000 and bodies < down < bodies + 1000
    assert sum(count[1] for count in found.values()) == proxy.up.count(start, time.time())


def test_a_slow_link_is_slow(proxy: Proxy) -> None:
    """What does not fit into the bucket takes its time in both directions, and so does each way's delay."""
    proxy.limit(rate=1e6, delay=0.05)
    start, body = time.monotonic(), bytes(BUCKET + 200_000)
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port)
    connection.request("POST", "/v1/push-object", body)
    assert connection.getresponse().read() == body
    connection.close()
    assert time.monotonic() - start >= 2 * 0.1 + 0.2 + 0.2 - 0.05  # a handshake, a request; up, then down
