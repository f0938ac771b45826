"""What `penstock thoughts` says where Ctrl-C ends it, and how much it may be asked."""

import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from penstock.workloads.thoughts.tasks import Example, Rings
from penstock.workloads.thoughts.thought_commands import thought_commands


class Interrupted(Rings):
    """Ctrl-C comes when it is opened, or when the first question is asked."""

    def example(self, random: object, level: int) -> Example:
        """There is none."""
        signal.raise_signal(signal.SIGINT)
        raise AssertionError(random, level)


def interrupted() -> Interrupted:
    """The task."""
    return Interrupted(6, 3)


def asked(*words: str) -> Result:
    """What the command made of its words."""
    return CliRunner().invoke(thought_commands, words)


def config(folder: Path) -> Path:
    """A recipe of the task, which is the configuration of a run as well."""
    folder.mkdir(exist_ok=True)
    file = folder / "config.toml"
    file.write_text(
        f'workload = "thoughts"\n[environment]\nid = "x"\nkwargs.task = "{__name__}:interrupted"\n'
    )
    return file


def test_what_is_kept_of_a_study_that_is_interrupted_is_said(tmp_path: Path) -> None:
    recipe, out = str(config(tmp_path / "run")), str(tmp_path / "out")
    result = asked("study", recipe, "--out", out)
    assert result.exit_code == 130
    assert result.stderr == (
        f"interrupted: complete results are kept in {out}; the same command continues from there\n"
    )


def test_a_measurement_that_is_interrupted_says_that_there_is_none(tmp_path: Path) -> None:
    config(tmp_path / "run")
    result = asked("check", str(tmp_path / "run"), "--trust")
    assert result.exit_code == 130
    assert result.stderr == f"interrupted: nothing was measured, and {tmp_path / 'run'} is as it was\n"


@pytest.mark.parametrize("command", ["check", "study"])
def test_more_questions_than_one_pass_holds_are_refused(command: str, tmp_path: Path) -> None:
    options = ["--out", str(tmp_path / "out")] if command == "study" else []
    result = asked(command, str(tmp_path), *options, "--questions", "16385")
    assert result.exit_code == 2
    assert "less than or equal to 16384" in result.stderr
