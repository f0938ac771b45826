"""The command line: what it answers to mistakes, and what it must not import."""

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from penstock.launch.cli.app import app
from penstock.launch.run.supervisor import penstock

HEAVY = ("torch", "gymnasium", "redis", "grpc", "matplotlib", "numpy", "pydantic", "transformers")
SERVICES = ("actor", "broker", "ui")


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    """`penstock ARGUMENTS`, to its end."""
    return subprocess.run(penstock(*arguments), capture_output=True, text=True, timeout=60, check=False)


def answer(*arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr: of a process for a service, which changes the process that it is in."""
    if arguments[0] in SERVICES:
        done = run(*arguments)
        return done.returncode, done.stdout, done.stderr
    told = CliRunner().invoke(app, arguments)
    return told.exit_code, told.stdout, told.stderr


_RUN_FILE: Final = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("command_line", sys.argv.pop(1))
command_line = sys.modules["command_line"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(command_line)
command_line.main()
"""


@pytest.mark.parametrize(("closed", "told"), [(">&-", ""), ("2>&-", "CartPole-v1")])
def test_a_stream_that_the_caller_has_closed_is_no_error(closed: str, told: str) -> None:
    words = penstock("train", "CartPole-v1", "--print-config")
    done = subprocess.run(
        ("sh", "-c", f'exec "$@" {closed}', "sh", *words),
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert told in done.stdout


def test_a_command_fails_as_usual_where_nobody_is_told() -> None:
    words = ("sh", "-c", 'exec "$@" 2>&-', "sh", *penstock("evaluate", "/nowhere"))
    assert subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 2


def test_modules_in_the_working_folder_hide_none_of_ours(tmp_path: Path) -> None:
    for name in ("actor", "broker", "launch", "learner", "penstock"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the working folder')\n")
    # No PYTHONPATH: what it names comes before the working folder anyway.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            _RUN_FILE,
            str(Path(__file__).parents[4] / "penstock/launch/cli/app.py"),
            "train",
            "CartPole-v1",
            "--print-config",
        ],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_help_names_every_command() -> None:
    reply = run("--help")
    assert reply.returncode == 0
    for name in (
        "train",
        "broker",
        "actor",
        "learner",
        "redis",
        "status",
        "evaluate",
        "plot",
        "doctor",
        "policy",
        "rlhf",
        "ui",
    ):
        assert f"  {name} " in reply.stdout


def test_help_imports_nothing_heavy() -> None:
    code = f"import sys, penstock.launch.cli.app; print([name for name in {HEAVY} if name in sys.modules])"
    reply = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert reply.stdout == "[]\n"


LIFE: Final = (
    "penstock.launch.cli.app, penstock.config.service_settings, "
    "penstock.runtime.foreground, penstock.runtime.lifecycle"
)
"""What every process loads before its own work."""


@pytest.mark.parametrize(
    ("modules", "absent"),
    [
        pytest.param("penstock.launch.run.plan, penstock.broker.service.process", (), id="broker"),
        pytest.param("penstock.launch.run.redis_service", ("grpc",), id="keeper of Redis"),
        pytest.param("penstock.launch.run.plan, penstock.launch.commands.train", ("grpc",), id="launcher"),
    ],
)
def test_a_process_that_neither_acts_nor_learns_loads_no_torch(modules: str, absent: tuple[str, ...]) -> None:
    heavy = ("torch", "gymnasium", "matplotlib", *absent)
    code = f"import sys, {LIFE}, {modules}; print([name for name in {heavy} if name in sys.modules])"
    reply = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert reply.stdout == "[]\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("train", "NoSuch-v9"), "environment.id='NoSuch-v9'"),
        (("train", "CartPole-v1", "--set", "actor.numbr=1"), "actor.numbr: unknown key"),
        (("train", "CartPole-v1", "--actors", "0"), "--actors"),
        (("train", "--resume", "nowhere"), "holds no config.toml"),
        (("actor", "--broker", "nonsense"), "HOST:PORT or unix:/path"),
        (
            ("actor", "--broker", "127.0.0.1:1", "--role", "spy"),
            "'spy' is not one of 'rollout', 'evaluation'",
        ),
        (("broker", "--redis", "unix:///nowhere", "--listen", "0.0.0.0:0"), "--insecure"),
        (("status", "nowhere"), "give --broker ADDRESS"),
        (("plot", "nowhere"), "holds no metrics.jsonl"),
        (("ui", "nowhere"), "name the one that holds runs"),
        (("ui", ".", "--listen", "0.0.0.0:0"), "say --insecure"),
        (("nonsense",), "No such command"),
    ],
)
def test_a_mistake_exits_2_with_its_remedy_on_stderr(arguments: tuple[str, ...], words: str) -> None:
    code, out, err = answer(*arguments)
    assert code == 2
    assert words in err
    assert out == ""


def test_status_of_a_broker_that_is_gone_exits_1() -> None:
    began = time.monotonic()
    code, _, err = answer("status", "--broker", "127.0.0.1:1")
    assert code == 1
    assert "does not answer" in err.splitlines()[-1]
    assert time.monotonic() - began < 20


def test_the_resolved_configuration_is_printed_as_toml() -> None:
    code, out, _ = answer("train", "CartPole-v1", "--set", "algorithm.epochs=9", "--print-config")
    assert code == 0
    assert "epochs = 9" in out
    assert 'id = "CartPole-v1"' in out


def test_a_redis_that_is_down_is_waited_for_as_long_as_was_said(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    reply = run(
        "train", "CartPole-v1", "--run-dir", str(run_dir),
        "--redis", "redis://127.0.0.1:1", "--set", "broker.redis_wait_s=1",
    )  # fmt: skip
    assert reply.returncode == 1
    lines = reply.stderr.splitlines()
    assert "waiting for redis" in lines[0]
    assert "did not answer for 1 s (broker.redis_wait_s)" in lines[-1]
    assert not run_dir.exists()


def test_a_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = f"127.0.0.1:{other.getsockname()[1]}"
        reply = run("broker", "--redis", f"unix://{tmp_path}/none", "--listen", address)
    assert reply.returncode == 2
    assert f"{address}: port in use; choose another" in reply.stderr.splitlines()[-1]


def test_status_takes_the_files_for_tls() -> None:
    code, _, err = answer("status", "--broker", "far:1", "--set", "security.tls_authority=/nowhere/ca.pem")
    assert code == 2
    assert "security: " in err
    assert "/nowhere/ca.pem" in err
