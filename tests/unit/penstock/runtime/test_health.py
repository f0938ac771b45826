"""What /metrics, /healthz and /readyz answer."""

import http.client
import json
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.rpc.address import AddressInUse
from penstock.runtime import health as health_module
from penstock.runtime.health import (
    ENDPOINT_VARIABLE,
    READER_S,
    Endpoint,
    Health,
    announce,
    read_endpoint,
    serve_http,
)


class Clock:
    """Time that passes when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock() -> Clock:
    """A clock at 0."""
    return Clock()


@pytest.fixture
def health(clock: Clock) -> Health:
    """Health of a test process."""
    return Health("test", clock)


@pytest.fixture
def port(health: Health) -> Iterator[int]:
    """Port of a served health."""
    server, port = serve_http(health, "127.0.0.1", 0)
    yield port
    server.shutdown()
    server.server_close()


def get(port: int, path: str, reader: str = "") -> tuple[int, str]:
    """Status and body."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path, headers={"User-Agent": reader} if reader else {})
    reply = connection.getresponse()
    status, body = reply.status, reply.read().decode()
    connection.close()
    return status, body


def test_a_process_is_alive_before_it_is_ready(health: Health, port: int) -> None:
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/readyz") == (503, "starting\n")
    health.set_ready(True)
    assert get(port, "/readyz") == (200, "ok\n")
    health.set_ready(False, "draining")
    assert get(port, "/readyz") == (503, "draining\n")


def test_a_lack_of_progress_turns_health_red_with_the_reason(health: Health, clock: Clock, port: int) -> None:
    health.set_ready(True)
    health.watch("updates", timeout_s=10)
    clock.now = 11
    assert get(port, "/healthz") == (503, "updates: no progress for 11 s (limit 10 s)\n")
    assert get(port, "/readyz")[0] == 503
    health.progress("updates")
    assert get(port, "/healthz")[0] == 200


def test_what_is_suspended_is_not_judged_until_it_moves_again(health: Health, clock: Clock) -> None:
    health.watch("updates", timeout_s=10)
    health.suspend("updates")
    clock.now = 100
    assert health.problem() is None
    health.progress("updates")
    clock.now = 111
    assert health.problem() is not None


def test_a_failure_stays(health: Health) -> None:
    health.fail("disk full")
    health.fail("something else")
    assert health.problem() == "disk full"


def test_metrics_name_the_role_of_the_process(port: int) -> None:
    status, body = get(port, "/metrics")
    assert status == 200
    assert 'penstock_cpu_seconds_total{role="test"}' in body
    assert get(port, "/secrets")[0] == 404


def waits(health: Health, port: int, *readers: str) -> bool:
    """Whether a process that ends would wait, and goes on once these have read the metrics."""
    over = threading.Event()
    waiting = threading.Thread(target=health.await_readers, args=(1e9, over))
    waiting.start()
    waiting.join(0.2)
    waited = waiting.is_alive()
    health._clock.now += 1.0  # type: ignore[attr-defined]
    for reader in readers:
        get(port, "/metrics", reader)
    waiting.join(10 if readers else 0)
    done = not waiting.is_alive()
    over.set()
    waiting.join(10)
    return waited and done


def test_who_reads_the_metrics_gets_to_read_what_was_counted_last(health: Health, port: int) -> None:
    for reader in ("Prometheus/2.42.0", "another"):
        get(port, "/metrics", reader)
    assert not waits(health, port, "another")
    assert waits(health, port, "Prometheus/2.42.0", "another")


def test_only_readers_with_a_name_that_read_lately_are_waited_for(
    health: Health, clock: Clock, port: int
) -> None:
    over = threading.Event()
    get(port, "/metrics")
    get(port, "/healthz", "kubelet")
    get(port, "/metrics", "Prometheus/2.42.0")
    clock.now = READER_S
    health.await_readers(1e9, over)


def test_a_reader_that_stays_away_is_not_waited_for_longer_than_said(
    health: Health, clock: Clock, port: int
) -> None:
    over = threading.Event()
    get(port, "/metrics", "Prometheus/2.42.0")
    clock.now = 1.0
    health.await_readers(0.0, over)
    over.set()
    health.await_readers(1e9, over)


def test_a_port_in_use_is_named(health: Health, port: int) -> None:
    with pytest.raises(AddressInUse, match=f"metrics.port={port}.*another port"):
        serve_http(health, "127.0.0.1", port)


def test_an_endpoint_is_announced_where_the_launcher_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "broker.json"
    assert read_endpoint(path) is None
    monkeypatch.setenv(ENDPOINT_VARIABLE, str(path))
    endpoint = announce("broker", metrics_port=9464, address="127.0.0.1:50051")
    assert read_endpoint(path) == endpoint
    assert isinstance(endpoint, Endpoint)
    assert json.loads(path.read_text())["address"] == "127.0.0.1:50051"


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health_module, "SILENCE_S", 0.2)
    server, port = serve_http(Health("broker"), "127.0.0.1", 0)
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=60) as silent:
            assert silent.recv(1) == b""
    finally:
        server.shutdown()
        server.server_close()


def test_a_reader_that_hangs_up_leaves_no_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    server, port = serve_http(Health("broker"), "127.0.0.1", 0)
    server.daemon_threads = False  # So that closing the server waits for them.
    for _ in range(20):
        hasty = socket.create_connection(("127.0.0.1", port))
        hasty.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        hasty.close()
    server.shutdown()
    server.server_close()
    assert capsys.readouterr().err == ""
