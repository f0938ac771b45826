"""A real reward service as a process."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final

from tests.support.run.broker_process import BrokerProcess, eventually
from tests.support.run.forked_process import PENSTOCK, ForkedProcess

PATIENCE_S: Final = 120.0


@contextmanager
def serving(
    model: Path, folder: Path, listen: str, assignments: Sequence[str] = ()
) -> Iterator[BrokerProcess]:
    """`penstock rlhf reward serve`, ready."""
    folder.mkdir()
    endpoints, log = folder / "reward.json", folder / "reward.log"
    more = [word for text in assignments for word in ("--set", text)]
    words = ("rlhf", "reward", "serve", str(model), "--listen", listen, "--endpoints", str(endpoints), *more)
    process = ForkedProcess(PENSTOCK, *words, output=log)
    server = BrokerProcess(process=process, endpoint_file=endpoints, log=log)
    try:
        eventually(server.is_ready, "readiness of the reward service", within_s=PATIENCE_S)
        yield server
    finally:
        server.end()


@contextmanager
def reward_endpoint(answer: Callable[[Any, str | None], tuple[int, bytes]]) -> Iterator[str]:
    """The URL of rewards over HTTP. answer: status and body for what is asked with which authorization."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, body = answer(asked, self.headers.get("Authorization"))
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: Any) -> None:
            """Nothing: its lines are not those of the run."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server, ThreadPoolExecutor(1) as threads:
        threads.submit(server.serve_forever)
        try:
            yield f"http://127.0.0.1:{server.server_port}/rewards"
        finally:
            server.shutdown()


def secured(certificates: Path, run: str) -> list[str]:
    """Assignments for a service over TLS."""
    files = {"tls_certificate": "server.pem", "tls_key": "server.key", "tls_authority": "authority.pem"}
    said = [f"security.{key}={json.dumps(str(certificates / name))}" for key, name in files.items()]
    return [f"run={run}", *said]
