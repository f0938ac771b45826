"""A run whose every connection is TLS: the certificates of `penstock certificates`, the processes of anybody.

Redis with users and client certificates, broker, learner and actor with theirs, `penstock status` as
operator.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Final

import pytest

from penstock.config.settings import dump, load
from penstock.runtime.health import ENDPOINT_VARIABLE, read_endpoint
from tests.support.run.harness import eventually
from tests.support.storage.guarded_redis import USERS, GuardedRedis, tls_binary

RUN: Final = "secure-run"
PENSTOCK: Final = str(Path(sys.executable).with_name("penstock"))
PATIENCE_S: Final = 120.0


@pytest.fixture
def server(short_folder: Path) -> Iterator[GuardedRedis]:
    binary = tls_binary()
    if binary is None:
        pytest.skip("no redis-server here was built with TLS")
    guarded = GuardedRedis(binary, short_folder, run=RUN, tls=True)
    guarded.start()
    yield guarded
    guarded.kill()


@contextmanager
def process(folder: Path, name: str, *words: str) -> Iterator["subprocess.Popen[bytes]"]:
    """A `penstock` command; killed at the end."""
    environment = {**os.environ, ENDPOINT_VARIABLE: str(folder / f"{name}.json"), "OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("wb") as log:
        running = subprocess.Popen([PENSTOCK, *words], stdout=log, stderr=log, env=environment)
    try:
        yield running
    finally:
        running.kill()
        running.wait(PATIENCE_S)


def configuration(folder: Path, server: GuardedRedis, party: str, password_of: str = "") -> Path:
    """The configuration file of one process: its own certificate, the run, a short task."""
    files = server.certificates
    security: dict[str, Any] = {
        "tls_certificate": str(files / f"{party}.pem"),
        "tls_key": str(files / f"{party}.key"),
        "tls_authority": str(files / "authority.pem"),
    }
    if password_of:
        security["redis_password_file"] = str(server.password_file(password_of))
    path = folder / f"{party}.toml"
    settings = load(
        [
            {
                "run": RUN,
                "security": security,
                "broker": {"patched_redis": server.binary.version},
                "actor": {"count": 1},
                "environment": {"count": 2},
                "learner": {"total_steps": 2048, "stop_at_target": False},
                "algorithm": {"batch_steps": 256},
                "evaluation": {"episodes": 2},
            }
        ]
    )
    path.write_text(dump(settings))
    return path


def test_every_process_works_with_the_certificates_of_the_command(
    server: GuardedRedis, tmp_path: Path
) -> None:
    server.admin().acl_log_reset()
    config = {
        "broker": configuration(tmp_path, server, "broker", "broker"),
        "learner": configuration(tmp_path, server, "learner", "learner"),
        "actor": configuration(tmp_path, server, "actor"),
        "operator": configuration(tmp_path, server, "operator"),
    }
    with ExitStack() as stack:
        redis = (
            "--redis",
            server.url_of("broker"),
            "--listen",
            "127.0.0.1:0",
            "--config",
            str(config["broker"]),
        )
        broker = stack.enter_context(process(tmp_path, "broker", "broker", *redis))
        eventually(lambda: read_endpoint(tmp_path / "broker.json"), "a broker that serves", PATIENCE_S)
        endpoint = read_endpoint(tmp_path / "broker.json")
        assert endpoint is not None
        address = endpoint.address
        place = ("--redis", server.url_of("learner"), "--run-dir", str(tmp_path / "run"))
        learner = stack.enter_context(
            process(tmp_path, "learner", "learner", *place, "--config", str(config["learner"]))
        )
        at_broker = ("--broker", address, "--config", str(config["actor"]))
        actors = [
            stack.enter_context(
                process(tmp_path, role, "actor", *at_broker, "--actor-id", role, "--role", role)
            )
            for role in ("rollout", "evaluation")
        ]
        seen = f'"run": "{RUN}"'
        eventually(lambda: seen in status(address, config["operator"])[1], "a status of the run", PATIENCE_S)
        code, shown = status(address, config["actor"])
        assert code != 0
        assert "may not call" in shown
        logs = "\n".join(path.read_text()[-2000:] for path in tmp_path.glob("*.log"))
        assert learner.wait(PATIENCE_S) == 0, logs
        # The others were not told that no learner follows: they wait for one until they are asked to end.
        for other in (*actors, broker):
            other.terminate()
        assert [other.wait(PATIENCE_S) for other in (*actors, broker)] == [0, 0, 0], logs
    assert (tmp_path / "run" / "checkpoints").is_dir()
    assert server.admin().acl_log() == []


def status(address: str, config: Path) -> tuple[int, str]:
    """`penstock status` with the certificate that the configuration names."""
    command = [PENSTOCK, "status", "--broker", address, "--config", str(config), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    return done.returncode, done.stdout + done.stderr


def test_the_command_makes_the_files_it_lists(tmp_path: Path) -> None:
    folder = tmp_path / "certificates"
    command = [
        PENSTOCK,
        "certificates",
        str(folder),
        "--run",
        RUN,
        "--host",
        "broker.example",
        "--actor",
        "gpu-3",
    ]
    command += ["--redis-users", str(USERS), "--password", "registry"]
    first = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
    assert first.returncode == 0, first.stderr
    made = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {"authority.pem", "broker.pem", "actor-gpu-3.key", "tokens", "users.acl"} <= made.keys()
    assert subprocess.run(command, check=False, capture_output=True, timeout=PATIENCE_S).returncode == 0
    again = {path.name: path.read_bytes() for path in folder.iterdir()}
    assert {name for name in made if made[name] == again[name]} == {
        "authority.pem",
        "authority.key",
        "registry.password",
    }
    wrong = subprocess.run(
        [PENSTOCK, "certificates", str(folder), "--run", "No Id"], capture_output=True, text=True, check=False
    )
    assert (wrong.returncode, "--run=" in wrong.stderr) == (2, True)
