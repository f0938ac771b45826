import fcntl
import json
import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

import pytest
from typer.testing import CliRunner

from penstock.config.run_folder import LOCK_FILE as RUN_LOCK_FILE
from penstock.launch.cli import plugin_commands
from penstock.launch.cli.app import app
from penstock.launch.cli.plugin_commands import plugin_paths
from penstock.launch.jobs.job_commands import JOB_FILE, job_commands, read_named, stop_named
from penstock.launch.jobs.job_process import BEGUN_FILE
from penstock.launch.jobs.local_job import LOCK_FILE
from penstock.launch.run.supervisor import penstock
from penstock.runtime.exit import Fatal
from penstock.runtime.failpoint import FAILPOINTS_VARIABLE

# ---- The command line: what it answers to mistakes, and what it must not import.


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
def test_a_closed_output_stream_is_no_error(closed: str, told: str) -> None:
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


def test_a_command_fails_as_usual_with_a_closed_stderr() -> None:
    words = ("sh", "-c", 'exec "$@" 2>&-', "sh", *penstock("evaluate", "/nowhere"))
    assert subprocess.run(words, capture_output=True, timeout=60, check=False).returncode == 2


def test_modules_in_the_working_folder_do_not_hide_the_programs(tmp_path: Path) -> None:
    for name in ("actor", "broker", "gymnasium", "launch", "learner", "penstock"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('a module of the working folder')\n")
    # No PYTHONPATH: what it names comes before the working folder anyway.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [
            sys.executable,
            "-P",
            "-c",
            _RUN_FILE,
            str(Path(__file__).parents[3] / "penstock/launch/cli/app.py"),
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


def test_the_status_of_a_dead_broker_exits_1() -> None:
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


def test_a_redis_that_is_down_is_awaited_for_the_set_time(tmp_path: Path) -> None:
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


def test_status_accepts_the_files_for_tls() -> None:
    code, _, err = answer("status", "--broker", "far:1", "--set", "security.tls_authority=/nowhere/ca.pem")
    assert code == 2
    assert "security: " in err
    assert "/nowhere/ca.pem" in err


# ---- Commands of installed workloads: found by name, imported when asked for, and no harm to the core's.


RECORD = """
from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="outside", environment="", spaces="", policy="", defaults="", target="", model="", generator="", \
runner="",
    commands={"count": "outside_commands:count", "many": "outside_commands:many", \
"train": "outside_commands:count"},
)
"""
COMMANDS = """
import typer

many = typer.Typer(help="Several commands.")


def count(to: int = 3) -> None:
    '''Count to a number.'''
    print(*range(1, to + 1))


@many.command()
def one() -> None:
    print("one of many")


@many.command()
def other() -> None:
    print("another")
"""


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """An installed workload with commands: a function, a group, and one whose name is the core's."""
    metadata = tmp_path / "outside-1.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: outside\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text("[penstock.workloads]\noutside = outside_record:WORKLOAD\n")
    (tmp_path / "outside_record.py").write_text(RECORD)
    (tmp_path / "outside_commands.py").write_text(COMMANDS)
    return tmp_path


def commands_run(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str
) -> "subprocess.CompletedProcess[str]":
    """`penstock WORDS`, with the modules of a folder on the path."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return subprocess.run(penstock(*words), capture_output=True, text=True, timeout=60, check=False)


def test_a_workload_adds_functions_and_groups(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = commands_run(outside, monkeypatch, "--help")
    assert "Count to a number." in reply.stdout
    assert "Several commands." in reply.stdout
    assert "Count to a number." not in commands_run(outside, monkeypatch, "train", "--help").stdout
    assert "1 2 3 4\n" == commands_run(outside, monkeypatch, "count", "--to", "4").stdout
    assert "one of many\n" == commands_run(outside, monkeypatch, "many", "one").stdout


def test_a_record_that_cannot_be_imported_is_reported_and_left_out(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outside / "outside_record.py").write_text("import nowhere_to_be_found\n")
    reply = commands_run(outside, monkeypatch, "--help")
    assert (reply.returncode, "  rlhf " in reply.stdout) == (0, True)
    assert "workload='outside': outside_record:WORKLOAD cannot be loaded" in reply.stderr
    assert "" == commands_run(outside, monkeypatch, "train", "--help").stderr


def test_a_command_that_cannot_be_imported_is_bad_usage(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outside / "outside_commands.py").write_text("import nowhere_to_be_found\n")
    reply = commands_run(outside, monkeypatch, "count")
    assert reply.returncode == 2
    assert reply.stderr.startswith("'outside_commands:count' cannot be loaded: No module named")
    assert "Traceback" not in reply.stderr


def test_help_with_the_commands_of_workloads_imports_nothing_heavy() -> None:
    assert {"rlhf", "chat"} <= plugin_paths().keys()
    code = (
        "import sys\nfrom penstock.launch.cli.app import app\napp(['--help'], standalone_mode=False)\n"
        f"print([name for name in {HEAVY} if name in sys.modules])"
    )
    reply = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert reply.stdout.endswith("\n[]\n")


def test_moved_command_ends_in_one_line_that_names_the_new_one() -> None:
    result = CliRunner().invoke(app, ["reward", "train", "rows.jsonl"])
    assert result.exit_code == 2
    assert result.stderr == "penstock reward: the command is `penstock rlhf reward`\n"


def test_help_lists_services_separately_and_at_most_21_other_commands() -> None:
    commands, services = CliRunner().invoke(app, ["--help"]).stdout.split("Services:")
    listed = ["redis", "broker", "actor", "learner", "serve"]
    assert re.findall(r"^  (\w+)", services, re.MULTILINE) == listed
    assert len(re.findall(r"^  (\w+)", commands.split("Commands:")[1], re.MULTILINE)) <= 21


@pytest.mark.parametrize("name", sorted(plugin_commands.COMMANDS))
def test_the_list_of_commands_agrees_with_each_commands_help(name: str) -> None:
    told = CliRunner().invoke(app, [name, "--help"])
    assert plugin_commands.COMMANDS[name][1] in " ".join(told.stdout.split())


# ---- What is listed of jobs whose files are odd.


def test_a_file_that_cannot_be_read_hides_no_other_job(tmp_path: Path) -> None:
    for name, text in (
        ("whole", json.dumps({"command": ["CartPole-v1"], "started": 5.0})),
        ("empty", ""),
        ("odd", "{}"),
        ("typed", json.dumps({"command": [], "started": "now"})),
    ):
        (tmp_path / name).mkdir()
        (tmp_path / name / JOB_FILE).write_text(text)
    found = {one.name: one for one in read_named(tmp_path)}
    assert sorted(found) == ["empty", "odd", "typed", "whole"]
    assert found["whole"].cause == ""
    for name in ("empty", "odd", "typed"):
        assert (found[name].state, found[name].cause) == ("failed", "job.json cannot be read")


def test_a_job_told_twice_to_end_gets_one_signal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []
    monkeypatch.setattr(os, "killpg", lambda group, _: sent.append(group))
    (tmp_path / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0}))
    (tmp_path / BEGUN_FILE).write_text(json.dumps({"group": 12}))
    with (tmp_path / LOCK_FILE).open("w") as job, (tmp_path / RUN_LOCK_FILE).open("w") as run:
        fcntl.flock(job, fcntl.LOCK_EX)
        fcntl.flock(run, fcntl.LOCK_EX)
        stop_named(tmp_path)
        stop_named(tmp_path)
    assert sent == [12]


@pytest.mark.parametrize("name", ["../other", "other/x", "..", "", ".hidden"])
@pytest.mark.parametrize("command", ["logs", "stop"])
def test_a_jobs_name_leads_only_to_its_folder(tmp_path: Path, command: str, name: str) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0}))
    (other / "train.log").write_text("secret")
    (tmp_path / "runs").mkdir()
    told = CliRunner().invoke(job_commands, [command, name, "--runs", str(tmp_path / "runs")])
    assert (told.exit_code, "is no name of a folder" in told.output) == (2, True), told.output


def test_a_job_whose_start_was_killed_is_listed(tmp_path: Path) -> None:
    done = subprocess.run(
        penstock("jobs", "start", "--name", "a", "--runs", str(tmp_path), "no-environment"),
        env=os.environ | {FAILPOINTS_VARIABLE: "jobs.started=kill"},
        capture_output=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == -9, done.stderr
    assert [(one.name, one.command) for one in read_named(tmp_path)] == [("a", ["no-environment"])]


def test_a_job_with_unknown_processes_is_not_signalled(tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_text(json.dumps({"command": [], "started": 1.0}))
    with (tmp_path / RUN_LOCK_FILE).open("w") as run:
        fcntl.flock(run, fcntl.LOCK_EX)
        for _ in range(2):
            with pytest.raises(Fatal, match="penstock control stop"):
                stop_named(tmp_path)
