"""`penstock gateway` as its users start it: one process on a database, and two on one PostgreSQL."""

import json
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("argon2", reason="the gateway needs its extra")

import httpx2

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import GatewayProcess
from tests.support.storage.postgresql_server import PostgresqlServer, find_programs

PASSWORD = "correct horse battery"  # noqa: S105 - only this test's


def operator(folder: Path, *words: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    """A command of the operator, in a folder."""
    return subprocess.run(
        penstock("gateway", *words), cwd=folder, input=stdin, capture_output=True, text=True, check=False
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a gateway of one person lies."""
    done = operator(tmp_path, "user", "add", "ada", "--project", "alpha", stdin=f"{PASSWORD}\n")
    assert done.returncode == 0, done.stderr
    return tmp_path


def new_token(folder: Path, project: str, *options: str) -> str:
    """A token of a program in a project that its owner, ada, adds. options: where the accounts are."""
    added = operator(folder, "user", "add", "ada", "--project", project, *options, stdin=f"{PASSWORD}\n")
    assert added.returncode == 0, added.stderr
    done = operator(folder, "token", "add", "program", "--project", project, *options)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sign_in(gateway: GatewayProcess) -> dict[str, Any]:
    """Tokens of the one person."""
    form = {"grant_type": "password", "username": "ada", "password": PASSWORD}
    reply = httpx2.post(f"{gateway.url}/api/auth/token", data=form, timeout=30)
    assert reply.status_code == 200, reply.text
    return dict(reply.json())


def me(gateway: GatewayProcess, token: str) -> int:
    """The status of asking who one is."""
    headers = {"Authorization": f"Bearer {token}"}
    return int(httpx2.get(f"{gateway.url}/api/me?secret=in-a-query", headers=headers, timeout=30).status_code)


def test_what_was_given_counts_after_a_kill(folder: Path) -> None:
    token = operator(folder, "token", "add", "ci", "--project", "alpha").stdout.strip()
    with GatewayProcess(folder) as gateway:
        grant = sign_in(gateway)
        assert me(gateway, grant["access_token"]) == me(gateway, token) == 200
        gateway.process.send_signal(signal.SIGKILL)
        gateway.process.wait()
    with GatewayProcess(folder) as gateway:
        assert me(gateway, grant["access_token"]) == me(gateway, token) == 200
        operator(folder, "user", "disable", "ada")
        assert me(gateway, grant["access_token"]) == 401
        assert me(gateway, token) == 200


def test_its_logs_and_metrics_hold_no_secret_and_no_query(folder: Path) -> None:
    with GatewayProcess(folder) as gateway:
        grant = sign_in(gateway)
        assert me(gateway, grant["access_token"]) == 200
        httpx2.get(f"{gateway.url}/api/nothing-like-{PASSWORD}".replace(" ", "-"), timeout=30)
        metrics = httpx2.get(gateway.metrics_url, timeout=30).text
        assert 'penstock_gateway_requests_total{code="200",method="GET",route="/api/me"}' in metrics
        assert "nothing-like" not in metrics
        assert gateway.end() == 0
    told = gateway.log.read_text()
    assert "serving" in told
    kept = [path.read_bytes() for path in folder.rglob("*") if path.is_file()]
    for secret in (PASSWORD, grant["access_token"], grant["refresh_token"], "in-a-query"):
        assert secret not in told
        assert all(secret.encode() not in content for content in kept)


def test_it_loads_neither_torch_nor_redis() -> None:
    code = (
        "import json, sys, penstock.launch.gateway.gateway_commands, penstock.gateway.process\n"
        "print(json.dumps(sorted(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    absent = {
        "torch",
        "safetensors",
        "gymnasium",
        "redis",
        "hiredis",
        "penstock.broker",
        "penstock.actor",
        "penstock.learner",
        "penstock.workloads",
    }
    assert set(json.loads(done.stdout)) & absent == set()


@pytest.fixture
def shared_database(tmp_path: Path) -> Iterator[str]:
    """An empty database of a PostgreSQL server."""
    programs = find_programs()
    assert programs is not None
    place = Path(tempfile.mkdtemp(prefix="ps-", dir="/tmp"))
    server = PostgresqlServer(programs, place)
    try:
        server.start()
        yield server.new_database("gateway")
    finally:
        server.stop()
        shutil.rmtree(place, ignore_errors=True)


@pytest.mark.skipif(find_programs() is None, reason="no PostgreSQL server found")
def test_two_gateways_on_one_database_are_one(shared_database: str, tmp_path: Path) -> None:
    options = ("--database", shared_database, "--registry", shared_database, "--keys", str(tmp_path / "keys"))
    with GatewayProcess(tmp_path, *options) as one, GatewayProcess(tmp_path, *options) as other:
        added = operator(
            tmp_path, "user", "add", "ada", "--project", "alpha", *options[:2], *options[4:], stdin=PASSWORD
        )
        assert added.returncode == 0, added.stderr
        grant = sign_in(one)
        assert me(other, grant["access_token"]) == 200
        headers = {"Authorization": f"Bearer {grant['access_token']}"}
        assert httpx2.post(f"{other.url}/api/auth/sign-out", headers=headers, timeout=30).status_code == 204
        assert me(one, grant["access_token"]) == 401


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--database", "postgresql://ada:sesame@host/d"),
            "everybody on this machine can read a command line",
        ),
        (("--database", "mysql://host/d"), "--database: accounts database url"),
        (("--listen", "0.0.0.0:0"), "passwords and tokens would travel in plaintext"),
        (("--runner", "kubernetes"), "--runner kubernetes and --cluster FILE come together"),
        (("--cluster", "c.toml"), "--runner kubernetes and --cluster FILE come together"),
        (("--runner", "kubernetes", "--cluster", "c.toml"), "from their pods; name a PostgreSQL"),
        (("--host", "https://gateway.example"), "--host https://gateway.example: write the name alone"),
        (("--quota", "rating=5"), "--quota rating=5: write NAME=NUMBER, with one of the names ratings,"),
        (("--quota", "ratings=-5"), "--quota ratings=-5: write NAME=NUMBER"),
        (("--origin", "*"), "--origin *: write it as browsers do"),
        (("--templates", ".", "--models", "/dev/null"), "--models /dev/null: File exists; name a folder"),
        (
            ("--templates", ".", "--models", "/proc/models"),
            "--models /proc/models: No such file or directory",
        ),
        (("user", "add", "a b", "--project", "alpha"), "name: use 1 to 128 of a-z"),
        (("user", "add", "bob", "--project", "No Project"), "project: use 1 to 24 of a-z"),
        (("user", "add", "bob", "--project", "alpha", "--role", "king"), "'king' is not one of"),
    ],
)
def test_what_cannot_be_is_said_in_a_line(tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    done = operator(tmp_path, *words, stdin=f"{PASSWORD}\n")
    assert done.returncode == 2, done.stderr
    assert message in done.stderr.splitlines()[-1]
    assert "sesame" not in done.stderr


def test_a_token_that_would_own_is_refused(folder: Path) -> None:
    done = operator(folder, "token", "add", "x", "--project", "alpha", "--role", "owner")
    assert done.returncode == 2
    assert "'owner' is not one of 'viewer', 'editor'" in done.stderr
