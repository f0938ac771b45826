"""Secrets are in no log, no printed configuration, no process list, no metric and no reply.

The processes are real and started as their users start them; their passwords, tokens and keys are such that
they are found wherever they turn up.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from tests.support.abuse.identities import PASSWORD, command_line, leaves_no_secret, locked_redis, printed
from tests.support.run import harness
from tests.support.run.harness import BrokerProcess, eventually
from tests.support.run.small_run import RUN
from tests.support.storage.guarded_redis import GuardedRedis
from tests.support.storage.redis_server import RedisServer, find_binaries

VARIABLE: Final = "PENSTOCK_SECURITY__REDIS_PASSWORD"


@pytest.fixture
def locked(short_folder: Path) -> Iterator[RedisServer]:
    with locked_redis(short_folder) as server:
        yield server


BROKER: Final = ("broker", "--listen", "127.0.0.1:0")


def shown_by(running: BrokerProcess) -> str:
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
    file = tmp_path / "password"
    file.write_text(f"{PASSWORD}\n")
    words = ("--redis", f"unix://{locked.folder / 'redis.sock'}", *(word.format(file=file) for word in more))
    with harness.service(tmp_path, *BROKER, *words, **environment) as running:
        eventually(running.is_ready, "readiness of the broker", within_s=60)
        assert PASSWORD not in shown_by(running)
        assert "penstock_" in shown_by(running)


def test_a_wrong_password_is_not_repeated_in_the_message(locked: RedisServer, tmp_path: Path) -> None:
    url = f"unix://{locked.folder / 'redis.sock'}"
    with harness.service(tmp_path, *BROKER, "--redis", url, **{VARIABLE: f"{PASSWORD}x"}) as running:
        code, last = running.wait()
    assert (code, PASSWORD in running.log.read_text()) == (2, False)
    assert "security.redis_password" in last


def test_print_config_shows_stars(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[security]\nredis_password = "{PASSWORD}"\n')
    shown = [
        printed("train", "CartPole-v1", "--print-config", **{VARIABLE: PASSWORD}),
        printed("train", str(file), "--print-config"),
    ]
    assert all('redis_password = "**********"' in text for text in shown), shown
    assert not any(PASSWORD in text for text in shown)


@pytest.mark.promise("secret-given-documented-road")
def test_a_whole_run_leaves_no_secret(locked: RedisServer, tmp_path: Path) -> None:
    settings = ("learner.total_steps=1024", "evaluation.episodes=2", "serving.listen=127.0.0.1:0")
    leaves_no_secret(locked, tmp_path, "CartPole-v1", settings)


def test_only_its_user_reads_the_log_of_an_embedded_redis(tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = ("train", "CartPole-v1", "--run-dir", str(run), "--total-steps", "512", "--set", "actor.count=1")
    done = harness.command(*words, umask=0)
    assert done.returncode == 0, done.stderr
    logs = [path for path in (run / "redis").rglob("*") if path.is_file()]
    assert any(path.name.startswith("appendonly") for path in logs)
    assert [(path, oct(path.stat().st_mode)) for path in run.rglob("*") if path.stat().st_mode & 0o077] == []
    assert run.stat().st_mode & 0o777 == 0o700


def test_only_their_owner_reads_keys_tokens_and_passwords(short_folder: Path) -> None:
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
    words = ("--redis", f"unix://{locked.folder / 'redis.sock'}")
    with harness.service(tmp_path, *BROKER, *words, **{VARIABLE: PASSWORD}) as running:
        eventually(running.is_ready, "readiness of the broker", within_s=60)
        labels = set(re.findall(r'(\w+)="', running.get("/metrics")[1]))
    ours = {"reason", "role", "le", "version", "phase", "generation", "part"}
    assert labels <= ours | {"implementation", "major", "minor", "patchlevel"}
