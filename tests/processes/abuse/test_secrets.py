"""Secrets are in no log, no printed configuration, no process list, no metric and no reply.

The processes are real and started as their users start them; their passwords, tokens and keys are such that
they are found wherever they turn up.
"""

import http.client
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from penstock.config.settings import load
from penstock.runtime.health import read_endpoint
from tests.support.run.broker_process import PATIENCE_S, BrokerProcess, eventually
from tests.support.run.small_run import RUN
from tests.support.storage.guarded_redis import GuardedRedis
from tests.support.storage.redis_server import RedisServer, find_binaries

PASSWORD: Final = "hunter2-0d9f"  # noqa: S105 - the one that is looked for
PENSTOCK: Final = (str(Path(sys.executable).with_name("penstock")),)
VARIABLE: Final = "PENSTOCK_SECURITY__REDIS_PASSWORD"
USERS: Final = Path("deploy/redis/users.acl").absolute()


@pytest.fixture
def locked(short_folder: Path) -> Iterator[RedisServer]:
    """A Redis with a password."""
    server = RedisServer(find_binaries()[0], short_folder)
    server.start()
    client: Any = redis.Redis.from_url(server.url)
    client.config_set("requirepass", PASSWORD)
    client.close()
    yield server
    server.kill()


@contextmanager
def broker(folder: Path, *words: str, **environment: str) -> Iterator[BrokerProcess]:
    """`penstock broker` with these words behind it."""
    folder.mkdir(exist_ok=True)
    endpoint, log = folder / "broker.json", folder / "broker.log"
    command = [*PENSTOCK, "broker", "--listen", "127.0.0.1:0", "--endpoints", str(endpoint), *words]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
    running = BrokerProcess(process=process, endpoint_file=endpoint, log=log)
    try:
        yield running
    finally:
        running.end()


def command_line(pid: int) -> str:
    """What `ps` shows to everybody."""
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def shown_by(running: BrokerProcess) -> str:
    """Everything that a process shows of itself."""
    pages = [running.get(page)[1] for page in ("/metrics", "/healthz", "/readyz")]
    return "\n".join([command_line(running.process.pid), running.log.read_text(), *pages])


WAYS: Final = {
    "in a file": (("--set", "security.redis_password_file={file}"), {}),
    "in the environment": ((), {VARIABLE: PASSWORD}),
}


@pytest.mark.parametrize(("more", "environment"), WAYS.values(), ids=WAYS.keys())
def test_a_password_is_shown_nowhere_however_it_was_given(
    locked: RedisServer, tmp_path: Path, more: tuple[str, ...], environment: dict[str, str]
) -> None:
    """The broker serves with it, and neither `ps`, logs nor pages have it."""
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    words = ("--redis", f"unix://{locked.folder / 'redis.sock'}", *(word.format(file=file) for word in more))
    with broker(tmp_path / "broker", *words, **environment) as running:
        eventually(running.is_ready, "readiness of the broker", within_s=60)
        assert PASSWORD not in shown_by(running)
        assert "penstock_" in shown_by(running)


def test_a_wrong_password_is_not_repeated_in_the_message(locked: RedisServer, tmp_path: Path) -> None:
    """Exit 2 names the setting."""
    url = f"unix://{locked.folder / 'redis.sock'}"
    with broker(tmp_path, "--redis", url, **{VARIABLE: f"{PASSWORD}x"}) as running:
        code, last = running.wait()
    assert (code, PASSWORD in running.log.read_text()) == (2, False)
    assert "security.redis_password" in last


def printed(*words: str, **environment: str) -> str:
    """What a command prints on both streams."""
    done = subprocess.run(
        [*PENSTOCK, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE_S * 3,
        env={**os.environ, **environment},
    )
    return done.stdout + done.stderr


def test_print_config_shows_stars(tmp_path: Path) -> None:
    """Given in the environment or in the file."""
    file = tmp_path / "run.toml"
    file.write_text(f'[security]\nredis_password = "{PASSWORD}"\n')
    shown = [
        printed("train", "CartPole-v1", "--print-config", **{VARIABLE: PASSWORD}),
        printed("train", str(file), "--print-config"),
    ]
    assert all('redis_password = "**********"' in text for text in shown), shown
    assert not any(PASSWORD in text for text in shown)


def test_settings_and_credentials_show_no_secret(short_folder: Path) -> None:
    """A representation may end in a traceback, JSON in a file."""
    settings = load([{"security": {"redis_password": PASSWORD}}])
    assert PASSWORD not in repr(settings) + str(settings) + settings.model_dump_json()
    with pytest.raises(ValueError, match="redis_password") as caught:
        load([{"security": {"redis_password": [PASSWORD]}}])
    assert PASSWORD not in str(caught.value)


ENVIRONMENT: Final = {
    "PGPASSWORD": "pg",
    "WANDB_API_KEY": "wandb",
    "OTEL_EXPORTER_OTLP_HEADERS": "authorization=otel",
    "HF_TOKEN": "hub",
}
"""Secrets that libraries take from the environment, by what theirs begin with."""


def planted(folder: Path) -> tuple[list[str], dict[str, str], list[str]]:
    """Settings and environment that carry secrets by every road that is documented, and the secrets."""
    certificates = folder / "certificates"
    words = ("--run", "guarded", "--actor", "a-0", "--password", "registry", "--password", "postgres")
    printed("certificates", str(certificates), *words, "--redis-users", str(USERS))
    mark = "planted-0d9f"
    (folder / "headers").write_text(f"Authorization: Bearer {mark}-one\nX-Api-Key: {mark}-two\n")
    environment = {name: f"{value}-{mark}" for name, value in ENVIRONMENT.items()}
    files = [*certificates.glob("*.key"), *certificates.glob("*.token"), *certificates.glob("*.password")]
    secrets = [secret_of(file) for file in files]
    secrets += [
        f"{mark}-one",
        f"{mark}-two",
        *(value.partition("=")[2] or value for value in environment.values()),
    ]
    settings = [
        f"security.http_headers_file={folder / 'headers'}",
        f"security.tls_certificate={certificates / 'learner.pem'}",
        f"security.tls_key={certificates / 'learner.key'}",
        f"security.tls_authority={certificates / 'authority.pem'}",
        f"security.token_file={certificates / 'actor.token'}",
        f"security.accepted_tokens={certificates / 'tokens'}",
    ]
    return settings, environment, [*secrets, PASSWORD]


def secret_of(file: Path) -> str:
    """What must not turn up: of a key the longest line of its PEM."""
    return max(file.read_text().splitlines(), key=len)


def test_a_whole_run_leaves_no_secret_behind(locked: RedisServer, tmp_path: Path) -> None:
    """`penstock train` with twenty secrets: no file, line, process, page or reply to an actor has one.

    Its files can be read by their user alone.
    """
    folder, log = tmp_path / "run", tmp_path / "train.log"
    (tmp_path / "password").write_text(f"{PASSWORD}\n")
    settings, environment, secrets = planted(tmp_path)
    assert len(set(secrets)) >= 20
    settings += [f"security.redis_password_file={tmp_path / 'password'}", "learner.total_steps=1024"]
    settings += ["evaluation.episodes=2", "run=guarded", "actor.count=1", "serving.listen=127.0.0.1:0"]
    url = f"unix://{locked.folder / 'redis.sock'}"
    words = ["train", "CartPole-v1", "--run-dir", str(folder), "--redis", url]
    words += [word for one in settings for word in ("--set", one)]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*PENSTOCK, *words], stdout=output, stderr=output, env={**os.environ, **environment}
        )
    seen: set[str] = set()
    try:
        while process.poll() is None:
            seen |= lines_of_family(process.pid) | pages_of(folder)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert process.returncode == 0, log.read_text()
    assert any("learner --redis" in line for line in seen)
    assert any("penstock_" in page for page in seen)
    told = "\n".join([*seen, log.read_text(), stored_in(locked)])
    assert [secret for secret in secrets if secret in told] == []
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert [path for path in files if any(one.encode() in path.read_bytes() for one in secrets)] == []
    assert [path for path in files if path.stat().st_mode & 0o077] == []
    assert folder.stat().st_mode & 0o777 == 0o700


def pages_of(folder: Path) -> set[str]:
    """The metrics of every process of a run that can be asked just now."""
    pages = set()
    for file in (folder / "endpoints").glob("*.json"):
        try:
            port = json.loads(file.read_text())["metrics_port"]
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=1.0) as reply:
                pages.add(reply.read().decode())
        except (OSError, ValueError, http.client.HTTPException):
            continue  # it is starting or ending
    return pages


def stored_in(server: RedisServer) -> str:
    """Everything that Redis keeps: the specification that actors receive lies there, too."""
    client: Any = redis.Redis(unix_socket_path=str(server.folder / "redis.sock"), password=PASSWORD)
    kept = b"".join(client.dump(key) for key in client.scan_iter())
    client.close()
    assert b"CartPole-v1" in kept
    return str(kept.decode(errors="replace"))


def lines_of_family(pid: int) -> set[str]:
    """Command lines of a process and its children."""
    found = set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            found |= {command_line(int(child)), *lines_of_family(int(child))}
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return found


def test_keys_tokens_and_passwords_are_readable_by_their_owner_alone(short_folder: Path) -> None:
    """0600 in a folder 0700; digests stand where a server only compares."""
    server = GuardedRedis(find_binaries()[0], short_folder, run=RUN)
    folder = server.certificates
    open_files = {path.name for path in folder.iterdir() if path.stat().st_mode & 0o077}
    assert {name for name in open_files if not name.endswith(".pem")} == set()
    assert folder.stat().st_mode & 0o077 == 0
    secrets = [
        path.read_text().strip() for path in folder.iterdir() if path.suffix in (".token", ".password")
    ]
    compared = (folder / "tokens").read_text() + (folder / "users.acl").read_text()
    assert len(secrets) >= 6
    assert not any(secret in compared for secret in secrets)
    assert len(re.findall(r"#[0-9a-f]{64}", compared)) == 3


def test_metrics_name_no_caller(tmp_path: Path, locked: RedisServer) -> None:
    """Labels are enumerations: no actor, address or identity."""
    words = ("--redis", f"unix://{locked.folder / 'redis.sock'}")
    with broker(tmp_path, *words, **{VARIABLE: PASSWORD}) as running:
        eventually(running.is_ready, "readiness of the broker", within_s=60)
        assert read_endpoint(running.endpoint_file) is not None
        labels = set(re.findall(r'(\w+)="', running.get("/metrics")[1]))
    assert labels <= {
        "reason",
        "role",
        "le",
        "version",
        "phase",
        "implementation",
        "major",
        "minor",
        "patchlevel",
        "generation",
        "part",
    }
