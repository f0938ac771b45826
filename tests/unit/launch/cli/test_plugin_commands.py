"""Commands of installed workloads: found by name, imported when asked for, and no harm to the core's."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.launch.cli import plugin_commands
from penstock.launch.cli.app import app
from penstock.launch.cli.plugin_commands import plugin_paths
from penstock.launch.run.supervisor import penstock

HEAVY = ("torch", "gymnasium", "redis", "grpc", "matplotlib", "numpy", "pydantic", "transformers")
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


def run(folder: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> "subprocess.CompletedProcess[str]":
    """`penstock WORDS`, with the modules of a folder on the path."""
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return subprocess.run(penstock(*words), capture_output=True, text=True, timeout=60, check=False)


def test_a_workload_adds_functions_and_groups(outside: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = run(outside, monkeypatch, "--help")
    assert "Count to a number." in reply.stdout
    assert "Several commands." in reply.stdout
    assert "Count to a number." not in run(outside, monkeypatch, "train", "--help").stdout
    assert "1 2 3 4\n" == run(outside, monkeypatch, "count", "--to", "4").stdout
    assert "one of many\n" == run(outside, monkeypatch, "many", "one").stdout


def test_a_record_that_cannot_be_imported_is_told_and_left_out(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outside / "outside_record.py").write_text("import nowhere_to_be_found\n")
    reply = run(outside, monkeypatch, "--help")
    assert (reply.returncode, "  rlhf " in reply.stdout) == (0, True)
    assert "workload='outside': outside_record:WORKLOAD cannot be loaded" in reply.stderr
    assert "" == run(outside, monkeypatch, "train", "--help").stderr


def test_a_command_that_cannot_be_imported_is_a_mistake_of_use(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (outside / "outside_commands.py").write_text("import nowhere_to_be_found\n")
    reply = run(outside, monkeypatch, "count")
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


def test_help_lists_services_apart_and_at_most_21_other_commands() -> None:
    commands, services = CliRunner().invoke(app, ["--help"]).stdout.split("Services:")
    listed = ["redis", "broker", "actor", "learner", "serve"]
    assert re.findall(r"^  (\w+)", services, re.MULTILINE) == listed
    assert len(re.findall(r"^  (\w+)", commands.split("Commands:")[1], re.MULTILINE)) <= 21


@pytest.mark.parametrize("name", sorted(plugin_commands.COMMANDS))
def test_the_list_of_commands_says_what_the_help_of_each_says(name: str) -> None:
    told = CliRunner().invoke(app, [name, "--help"])
    assert plugin_commands.COMMANDS[name][1] in " ".join(told.stdout.split())
