import asyncio
import http.client
import json
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from penstock.config.settings import ConfigurationError, Settings
from penstock.rpc.address import AddressInUse
from penstock.rpc.gate import Boundary
from penstock.runtime import health as health_module
from penstock.runtime import metrics
from penstock.runtime.health import (
    ENDPOINT_VARIABLE,
    READER_S,
    Endpoint,
    Health,
    announce,
    read_endpoint,
    serve_http,
)
from penstock.runtime.lifecycle import LIFELINE_VARIABLE, Lifecycle
from penstock.runtime.server_frame import ServerFrame


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def health() -> Health:
    return Health("test", Clock())


def pass_time(health: Health, seconds: float) -> None:
    health._clock.now += seconds  # type: ignore[attr-defined]


@pytest.fixture
def port(health: Health) -> Iterator[int]:
    server, port = serve_http(health, "127.0.0.1", 0)
    yield port
    server.shutdown()
    server.server_close()


def get(port: int, path: str, reader: str = "") -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    connection.request("GET", path, headers={"User-Agent": reader} if reader else {})
    reply = connection.getresponse()
    status, body = reply.status, reply.read().decode()
    connection.close()
    return status, body


def test_a_process_is_alive_before_it_is_ready(health: Health, port: int) -> None:
    assert get(port, "/secrets")[0] == 404
    assert 'penstock_cpu_seconds_total{role="test"}' in get(port, "/metrics")[1]
    with pytest.raises(AddressInUse, match=f"metrics.port={port}.*another port"):
        serve_http(health, "127.0.0.1", port)
    assert get(port, "/healthz") == (200, "ok\n")
    assert get(port, "/readyz") == (503, "starting\n")
    health.set_ready(True)
    assert get(port, "/readyz") == (200, "ok\n")
    health.set_ready(False, "draining")
    assert get(port, "/readyz") == (503, "draining\n")


def test_a_lack_of_progress_turns_health_red_with_the_reason(health: Health, port: int) -> None:
    health.set_ready(True)
    health.watch("updates", timeout_s=10)
    pass_time(health, 11)
    assert get(port, "/healthz") == (503, "updates: no progress for 11 s (limit 10 s)\n")
    assert get(port, "/readyz")[0] == 503
    health.progress("updates")
    assert get(port, "/healthz")[0] == 200
    health.suspend("updates")
    pass_time(health, 100)
    assert health.problem() is None
    health.progress("updates")
    pass_time(health, 11)
    assert health.problem() is not None
    for failure in ("disk full", "something else"):
        health.fail(failure)
    assert health.problem() == "disk full"


def waits(health: Health, port: int, *readers: str, within_s: float = 10.0) -> bool:
    """Whether a process that ends would wait, and goes on once these have read the metrics."""
    over = threading.Event()
    waiting = threading.Thread(target=health.await_readers, args=(1e9, over))
    waiting.start()
    waiting.join(0.2)
    waited = waiting.is_alive()
    pass_time(health, 1.0)
    for reader in readers:
        get(port, "/metrics", reader)
    waiting.join(within_s)
    done = not waiting.is_alive()
    over.set()
    waiting.join(10)
    return waited and done


def test_readers_of_metrics_get_the_last_counts(health: Health, port: int) -> None:
    for reader in ("Prometheus/2.42.0", "another"):
        get(port, "/metrics", reader)
    assert not waits(health, port, "another", within_s=0.2)
    assert waits(health, port, "Prometheus/2.42.0", "another")


def test_only_readers_with_a_name_that_read_lately_are_waited_for_and_not_for_longer_than_said(
    health: Health, port: int
) -> None:
    over = threading.Event()
    get(port, "/metrics")
    get(port, "/healthz", "kubelet")
    get(port, "/metrics", "Prometheus/2.42.0")
    pass_time(health, READER_S)
    health.await_readers(1e9, over)
    get(port, "/metrics", "Prometheus/2.42.0")
    pass_time(health, 1.0)
    health.await_readers(0.0, over)
    over.set()
    health.await_readers(1e9, over)


def test_an_endpoint_is_announced_where_the_launcher_expects_it(
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


SERVICE = """
import sys, threading
from penstock.runtime.lifecycle import Fatal
from penstock.runtime.lifecycle import run_service
from penstock.config.settings import ConfigurationError
def main(lifecycle):
    lifecycle.on_drain(lambda: print("callback", lifecycle.reason, flush=True))
    print("up", flush=True)
    lifecycle.draining.wait()
    {then}
    return 0
sys.exit(run_service(main, "test"))
"""


@contextmanager
def service(
    then: str = "pass", lifeline: int | None = None, prefix: Sequence[str] = ()
) -> Iterator[subprocess.Popen[str]]:
    """A running service that does `then` when it drains. prefix: the words before its command line."""
    environment = {**os.environ} | ({} if lifeline is None else {LIFELINE_VARIABLE: str(lifeline)})
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", SERVICE.format(then=then)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        pass_fds=() if lifeline is None else (lifeline,),
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("prefix", "signals", "reason", "code"),
    [
        ([], [signal.SIGTERM], "SIGTERM", 0),
        ([], [signal.SIGINT], "SIGINT", 130),
        (["env", "--default-signal=HUP"], [signal.SIGHUP], "SIGHUP", 0),
        (["nohup"], [signal.SIGHUP, signal.SIGTERM], "SIGTERM", 0),
    ],
    ids=["terminated", "interrupted", "closed-terminal", "nohup"],
)
def test_a_signal_drains(prefix: list[str], signals: list[signal.Signals], reason: str, code: int) -> None:
    with service(prefix=prefix) as process:
        for one in signals:
            process.send_signal(one)
        out, _ = process.communicate(timeout=10)
        assert (out, process.returncode) == (f"callback {reason}\n", code)


def test_a_closed_lifeline_starts_draining() -> None:
    read_fd, write_fd = os.pipe()
    with service(lifeline=read_fd) as process:
        os.close(read_fd)
        os.close(write_fd)
        out, _ = process.communicate(timeout=10)
        assert (out, process.returncode) == ("callback the launcher is gone\n", 0)


def test_a_second_signal_ends_a_drain_that_hangs() -> None:
    with service(then="threading.Event().wait()") as process:
        process.send_signal(signal.SIGINT)
        assert process.stdout is not None
        assert process.stdout.readline() == "callback SIGINT\n"
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(0.3)
            except subprocess.TimeoutExpired:
                continue
        assert process.returncode == 130


@pytest.mark.parametrize(
    ("then", "code", "last"),
    [
        ("raise Fatal('the disk is full')", 1, "the disk is full"),
        ("raise ConfigurationError('seed=-1: use 0 or more')", 2, "seed=-1: use 0 or more"),
        ("raise RuntimeError('unforeseen')", 1, "RuntimeError: unforeseen"),
    ],
)
def test_the_cause_is_the_last_line_on_stderr(then: str, code: int, last: str) -> None:
    with service(then=then) as process:
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=10)
        assert (process.returncode, err.splitlines()[-1]) == (code, last)


def test_every_callback_is_called_on_a_drain_until_its_block_is_left() -> None:
    lifecycle, called = Lifecycle("test"), list[str]()

    def fail() -> None:
        raise RuntimeError("closed already")

    lifecycle.on_drain(fail)
    lifecycle.on_drain(lambda: called.append("second"))
    with lifecycle.calling_on_drain(lambda: called.append("outlived")):
        pass
    with lifecycle.calling_on_drain(lambda: called.append("inside")):
        lifecycle.drain("enough")
    assert called == ["second", "inside"]
    lifecycle.on_drain(lambda: called.append(f"at once: {lifecycle.reason}"))
    lifecycle.drain("again")
    assert called == ["second", "inside", "at once: enough"]


ON_A_FULL_DISK = """
import sys
from penstock.runtime.lifecycle import leave, run_service
def main(lifecycle):
    with open("/dev/full", "w") as file:
        file.write("a checkpoint")
leave(run_service(main, "learner"))
"""


@pytest.mark.parametrize("is_log_full", [False, True])
def test_a_full_disk_ends_a_service_with_3_also_when_its_log_is_on_it(is_log_full: bool) -> None:
    with open("/dev/full", "wb") as full:  # noqa: PTH123 - a device
        process = subprocess.run(
            [sys.executable, "-c", ON_A_FULL_DISK],
            stderr=full if is_log_full else subprocess.PIPE,
            check=False,
        )
    assert process.returncode == 3
    if not is_log_full:
        last = process.stderr.decode().splitlines()[-1]
        assert last == "learner cannot write its files: No space left on device; make room, then resume"


def families() -> list[tuple[str, str]]:
    text = metrics.exposition("every role").decode()
    found = re.findall(r"^# HELP (\S+) (.*)$", text, re.MULTILINE)
    return [(name, words) for name, words in found if not name.startswith(("process_", "python_"))]


def test_every_metric_has_prefix_help_and_unit_and_few_labels() -> None:
    assert len(families()) > 50
    for name, words in families():
        assert re.fullmatch(r"penstock_[a-z][a-z0-9_]*", name), name
        assert len(words) > 10, name
        assert ", in seconds" not in words or "_seconds" in name, name
        assert ", in bytes" not in words or "_bytes" in name, name
    labels = {name for one in vars(metrics).values() for name in getattr(one, "_labelnames", ())}
    assert labels <= {
        *("reason", "cause", "phase", "method", "role", "evaluation", "le", "arm", "fallback", "call"),
        *("tracker", "actions", "split", "direction", "by"),
    }, "labels come from small enumerations"


def test_a_process_serves_only_the_metrics_of_its_role() -> None:
    actor, learner = (metrics.exposition(role).decode() for role in ("actor", "learner"))
    assert "penstock_outbox_fragments" in actor
    assert "penstock_mean_return" not in actor
    assert "penstock_mean_return" in learner
    assert "penstock_outbox_fragments" not in learner
    evaluator = metrics.exposition("evaluator").decode()
    assert "penstock_outbox_fragments" not in evaluator
    assert "penstock_weight_version_applied" in actor
    assert "penstock_weight_version_applied" not in evaluator
    assert "penstock_log_closed" not in learner
    assert "penstock_log_closed" in metrics.exposition("broker").decode()
    assert "process_resident_memory_bytes" in metrics.exposition("redis").decode()


def test_metrics_that_alerts_watch_exist_before_their_first_event() -> None:
    assert 'penstock_updates_skipped_total{reason="nan"}' in metrics.exposition("learner").decode()
    for reason in ("full", "invalid", "overloaded", "malformed"):
        assert f'penstock_refusals_total{{reason="{reason}"}}' in metrics.exposition("broker").decode()
    assert 'penstock_actor_wait_seconds_total{cause="leave"}' in metrics.exposition("actor").decode()
    # Other tests of this process may have withdrawn some.
    assert re.search(
        r"^penstock_canaries_withdrawn_total \d", metrics.exposition("server").decode(), re.MULTILINE
    )


def test_the_service_of_a_workload_serves_its_own_metric_families() -> None:
    declared = metrics.declare("tested")
    declared.counter("tested_calls", "Calls that a test made").inc(3)
    assert "penstock_tested_calls_total 3.0" in metrics.exposition("tested").decode()
    assert "penstock_refusals_total" in metrics.exposition("tested").decode()
    assert "penstock_tested_calls" not in metrics.exposition("learner").decode()
    for role in ("tested", "learner"):
        with pytest.raises(ValueError, match=f"role='{role}': has its metrics already"):
            metrics.declare(role)


FRAME_SERVICE = "penstock.v1.ControlService"
STATUS = health_pb2.HealthCheckResponse.ServingStatus


def framed(listen: str = "127.0.0.1:0") -> ServerFrame:
    return ServerFrame("broker", (FRAME_SERVICE,), Settings(), listen, boundary=Boundary())


async def test_a_server_announces_draining_before_it_releases_held_calls() -> None:
    frame = framed()
    address = frame.bind()
    with pytest.raises(ConfigurationError, match="in use"):
        framed(address).bind()
    async with grpc.aio.insecure_channel(address) as channel:
        await frame.begin(metrics_port=0)
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=FRAME_SERVICE)
        )
        assert (await watch.read()).status == STATUS.SERVING
        released: list[bool] = []
        draining = asyncio.create_task(frame.drain(5.0, release=lambda: released.append(True)))
        assert (await watch.read()).status == STATUS.NOT_SERVING
        watch.cancel()
        await asyncio.wait_for(draining, 10)
        assert released == [True]
    await frame.close()


@pytest.mark.parametrize("data", [b"\xff", b"\x0a\x05ab"])
async def test_a_standard_service_refuses_invalid_bytes_too(
    data: bytes,
) -> None:
    frame = framed()
    async with grpc.aio.insecure_channel(frame.bind()) as channel:
        await frame.begin(metrics_port=0)
        with pytest.raises(grpc.aio.AioRpcError) as single:
            await channel.unary_unary("/grpc.health.v1.Health/Check", None, None)(data, timeout=10)
        with pytest.raises(grpc.aio.AioRpcError) as many:
            await channel.unary_stream("/grpc.health.v1.Health/Watch", None, None)(data, timeout=10).read()
    assert single.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert many.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await frame.close()
