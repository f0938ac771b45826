"""Secrets are in no log, no printed configuration, no process list, no metric and no reply.

The processes are real and started as their users start them; their passwords, tokens and keys are such that
they are found wherever they turn up.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import pytest
import redis

from launch.cli.password_hiding import without_password
from penstock.config.settings import load
from penstock.runtime.health import read_endpoint
from tests.support.run.broker_process import PATIENCE_S, BrokerProcess, eventually
from tests.support.run.small_run import RUN
from tests.support.storage.guarded_redis import GuardedRedis
from tests.support.storage.redis_server import RedisServer, find_binaries

PASSWORD: Final = "hunter2-0d9f"  # noqa: S105 - the one that is looked for
PENSTOCK: Final = (str(Path(sys.executable).with_name("penstock")),)
VARIABLE: Final = "PENSTOCK_SECURITY__REDIS_PASSWORD"


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
    "in the URL": ("unix://:{password}@{path}", ()),
    "in the URL's query": ("unix://{path}?password={password}", ()),
    "assigned": ("unix://{path}", ("--set", "security.redis_password={password}")),
    "assigned with quotes": ("unix://{path}", ("--set", 'security.redis_password="{password}"')),
    "in a file": ("unix://{path}", ("--set", "security.redis_password_file={file}")),
}


@pytest.mark.parametrize(("url", "more"), WAYS.values(), ids=WAYS.keys())
def test_a_password_is_shown_nowhere_however_it_was_given(
    locked: RedisServer, tmp_path: Path, url: str, more: tuple[str, ...]
) -> None:
    """The broker serves with it, and neither `ps`, logs nor pages have it."""
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    known = {"password": PASSWORD, "path": locked.folder / "redis.sock", "file": file}
    words = [word.format(**known) for word in ("--redis", url, *more)]
    with broker(tmp_path / "broker", *words) as running:
        eventually(running.is_ready, "readiness of the broker", within_s=60)
        assert PASSWORD not in shown_by(running)
        assert "penstock_" in shown_by(running)


def test_a_wrong_password_is_not_repeated_in_the_message(locked: RedisServer, tmp_path: Path) -> None:
    """Exit 2 names the setting."""
    with broker(tmp_path, "--redis", f"unix://:{PASSWORD}x@{locked.folder / 'redis.sock'}") as running:
        code, last = running.wait()
    assert (code, PASSWORD in running.log.read_text()) == (2, False)
    assert "security.redis_password" in last


def test_a_crash_shows_no_secret(tmp_path: Path) -> None:
    """A Redis that is not there, a URL that is none, a port that cannot be.

    Messages and tracebacks are clean.
    """
    for words in (
        ("--redis", f"redis://u:{PASSWORD}@127.0.0.1:9", "--set", "broker.redis_wait_s=1"),
        ("--redis", f"redis://u:{PASSWORD}@host:port"),
        ("--redis", f"rediss://u:{PASSWORD}@["),
    ):
        with broker(tmp_path, *words) as running:
            assert running.wait()[0] != 0
        assert PASSWORD not in running.log.read_text(), words[1]


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
    """Given in the URL, assigned, in the environment or in the file."""
    file = tmp_path / "run.toml"
    file.write_text(f'[security]\nredis_password = "{PASSWORD}"\n')
    url = f"redis://user:{PASSWORD}@far:6379/0"
    shown = [
        printed("train", "CartPole-v1", "--print-config", "--redis", url),
        printed("train", "CartPole-v1", "--print-config", "--set", f"broker.redis={url}"),
        printed("train", "CartPole-v1", "--print-config", "--set", f"security.redis_password={PASSWORD}"),
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


def test_a_whole_run_leaves_no_password_behind(locked: RedisServer, tmp_path: Path) -> None:
    """`penstock train` with a Redis of the user's: no file of the run, no line and no process has it."""
    folder = tmp_path / "run"
    log = tmp_path / "train.log"
    url = f"unix://:{PASSWORD}@{locked.folder / 'redis.sock'}"
    words = ("train", "CartPole-v1", "--run-dir", str(folder), "--actors", "1", "--redis", url)
    limits = ("--set", "learner.total_steps=1024", "--set", "evaluation.episodes=2")
    with log.open("wb") as output:
        process = subprocess.Popen([*PENSTOCK, *words, *limits], stdout=output, stderr=output)
    seen: set[str] = set()
    try:
        while process.poll() is None:
            seen |= lines_of_family(process.pid)
    finally:
        process.kill()
        process.wait(PATIENCE_S)
    assert process.returncode == 0, log.read_text()
    assert any("learner --redis" in line for line in seen)
    assert not any(PASSWORD in line for line in seen)
    assert PASSWORD not in log.read_text()
    written = [
        path for path in folder.rglob("*") if path.is_file() and PASSWORD.encode() in path.read_bytes()
    ]
    assert written == []


def lines_of_family(pid: int) -> set[str]:
    """Command lines of a process and its children, but for the moment before it hides its own."""
    found = set()
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        try:
            found |= {command_line(int(child)), *lines_of_family(int(child))}
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return found


HIDDEN: Final = {
    "nothing to hide": (
        ["penstock", "broker", "--redis", "redis://h"], ["penstock", "broker", "--redis", "redis://h"], None,
    ),
    "in a URL": (["p", "--redis", "redis://u:s@h"], ["p", "--redis", "redis://u@h"], "s"),
    "joined": (["p", "--redis=redis://:s@h:1/2"], ["p", "--redis=redis://h:1/2"], "s"),
    "assigned": (["p", "--set", "security.redis_password=s", "--json"], ["p", "--json"], "s"),
    "assigned, joined": (["p", "--set=security.redis_password='s t'"], ["p"], "s t"),
    "a URL assigned": (
        ["p", "--set", "broker.redis=redis://:s@h"], ["p", "--set", "broker.redis=redis://h"], "s",
    ),
    "in both": (
        ["p", "--set", "security.redis_password=a", "--redis", "redis://:b@h"],
        ["p", "--redis", "redis://h"],
        "b",
    ),
    "an equals sign in it": (["p", "--set", "security.redis_password=a=b"], ["p"], "a=b"),
}  # fmt: skip


@pytest.mark.parametrize(("given", "kept", "password"), HIDDEN.values(), ids=HIDDEN.keys())
def test_a_command_line_loses_its_password(given: list[str], kept: list[str], password: str | None) -> None:
    """And nothing else."""
    assert without_password(given) == (kept, password)


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
