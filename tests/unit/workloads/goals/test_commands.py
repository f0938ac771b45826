"""The executor `commands` with real programs: what is allowed, limits, and its own folder."""

import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.goals.live_host import (
    CommandFile,
    Commands,
    GoalCommand,
    NotAllowed,
    read_commands,
)

TOUCH, PRINTF, SLEEP, CAT, RM, FIND = (
    f"/usr/bin/{name}" for name in ["touch", "printf", "sleep", "cat", "rm", "find"]
)
PYTHON = sys.executable


def executor(folder: Path, command: list[str], *, limit_s: float = 5, output_bytes: int = 4096) -> Commands:
    """One goal `act`, whose program is allowed."""
    goal = GoalCommand(name="act", command=tuple(command))
    told = CommandFile(
        folder=folder, allow=(command[0],), limit_s=limit_s, output_bytes=output_bytes, goal=(goal,)
    )
    return Commands(told, acts=True)


def test_a_command_acts_in_its_own_folder(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.log").write_text("full")
    outcome = executor(tmp_path, [FIND, ".", "-name", "*.log", "-print", "-delete"]).carry_out("act")
    assert outcome.success
    assert list(tmp_path.iterdir()) == []
    assert sorted(outcome.output.split()) == ["./0.log", "./1.log", "./2.log"]
    failed = executor(tmp_path, [CAT, "absent"]).carry_out("act")
    assert (failed.success, failed.error) == (False, "exit 1")
    assert "No such file" in failed.output


def test_one_that_may_not_act_starts_nothing(tmp_path: Path) -> None:
    one = Commands(executor(tmp_path, [TOUCH, "done"])._file, acts=False)
    with pytest.raises(ConfigurationError, match="`penstock inject`.*environment.kwargs.actors_act=true"):
        one.carry_out("act")
    with pytest.raises(ConfigurationError, match="actors_act=true"):
        one.reset(0)
    assert list(tmp_path.iterdir()) == []


def test_no_shell_reads_arguments(tmp_path: Path) -> None:
    words = ["; touch /tmp/x", "$(id)", "`id`", "$HOME", "*", "> out", "&& id"]
    outcome = executor(tmp_path, [PRINTF, "%s|" * len(words), *words]).carry_out("act")
    assert outcome.output == "".join(f"{word}|" for word in words)
    assert list(tmp_path.iterdir()) == []


def test_a_command_that_hangs_is_killed_with_all_it_started(tmp_path: Path) -> None:
    code = (
        "import subprocess,sys,time;"
        "p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']);"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    outcome = executor(tmp_path, [PYTHON, "-c", code], limit_s=1.5).carry_out("act")
    assert (outcome.success, outcome.error) == (False, "above 1.5 s")
    assert ends(int(outcome.output))


def test_what_outlives_its_command_is_killed(tmp_path: Path) -> None:
    code = (
        "import subprocess,sys; p=subprocess.Popen([sys.executable,'-c','import time; time.sleep(600)']);"
        "print(p.pid)"
    )
    outcome = executor(tmp_path, [PYTHON, "-c", code]).carry_out("act")
    assert outcome.success
    assert ends(int(outcome.output))


def ends(pid: int) -> bool:
    """Whether a process is gone, or ends soon: one that was killed needs a moment on a busy machine."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 20)[0])
    finally:
        os.close(handle)


def test_output_is_bounded(tmp_path: Path) -> None:
    code = "import sys; sys.stdout.buffer.write(b'\\xff' + b'x' * 5_000_000)"
    outcome = executor(tmp_path, [PYTHON, "-c", code], output_bytes=10).carry_out("act")
    assert outcome.success
    assert outcome.output == "\ufffd" + "x" * 9


def test_a_clean_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_TOKEN", "s3cret")
    code = "import os,sys; print(sorted(os.environ), repr(sys.stdin.read()), os.getcwd())"
    outcome = executor(tmp_path, [PYTHON, "-c", code]).carry_out("act")
    assert "s3cret" not in outcome.output
    assert "TOKEN" not in outcome.output
    assert outcome.output.endswith(f"'' {tmp_path.resolve()}\n")
    assert signal.getsignal(signal.SIGINT) is not None


NAMES = st.sampled_from(["sh", "bash", "rm", "cat", "touch", "../bin/cat", "cat ", "CAT", "", "sudo"])
PROGRAMS = st.one_of(
    st.builds(lambda folder, name: folder + name, st.sampled_from(["", "/bin/", "/usr/bin/", "./"]), NAMES),
    st.text(max_size=30),
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(program=PROGRAMS, arguments=st.lists(st.text(max_size=20), max_size=4))
def test_nothing_is_started_that_is_not_on_the_list(
    program: str, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def note(command: list[str], **options: object) -> None:
        started.append(str(options["executable"]))
        assert options["shell"] is False
        assert command[0] == options["executable"]
        raise OSError("not in this test")

    monkeypatch.setattr(subprocess, "Popen", note)
    told = CommandFile.model_construct(
        folder=tmp_path,
        allow=(TOUCH,),
        limit_s=1.0,
        output_bytes=10,
        goal=(GoalCommand.model_construct(name="act", command=(program, *arguments), safe=False),),
    )
    one = Commands(told, acts=True)
    if program == TOUCH:
        one.carry_out("act")
    else:
        with pytest.raises(NotAllowed):
            one.carry_out("act")
        assert started == []
    with pytest.raises(KeyError):
        one.carry_out(program + "!")


@pytest.mark.parametrize(
    ("lines", "why"),
    [
        ('allow = ["find"]', "allow='find': must be the absolute path"),
        ('allow = ["/usr/bin/absent"]', "must be the absolute path of a program that can be started"),
        ('allow = ["/bin/sh"]', "allow='/bin/sh': starts any program in its arguments"),
        ('allow = ["/usr/bin/env"]', "starts any program in its arguments"),
        ('allow = ["/usr/bin/cat"]', "goal 'clean': '/usr/bin/find' is not among allow"),
        ('allow = ["/usr/bin/find"]\nlimit_s = 0', "limit_s="),
        ('allow = ["/usr/bin/find"]\nfolder = "/"', "folder='/': must be the absolute path of a folder"),
        ('allow = ["/usr/bin/find"]\nfolder = "here"', "folder='here'"),
        ('allow = ["/usr/bin/find"]\nshell = true', "shell="),
        ("allow = [", "cannot be read"),
    ],
)
def test_a_file_that_would_allow_too_much_is_refused(tmp_path: Path, lines: str, why: str) -> None:
    folder = "" if "folder" in lines else f'folder = "{tmp_path}"\n'
    path = tmp_path / "goals.toml"
    path.write_text(f'{folder}{lines}\n[[goal]]\nname = "clean"\ncommand = ["/usr/bin/find", "."]\n')
    with pytest.raises(ConfigurationError, match=why):
        read_commands(path)


def test_a_good_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "goals.toml"
    path.write_text(
        f'folder = "{tmp_path}"\nallow = ["{FIND}"]\n[[goal]]\nname = "clean"\ncommand = ["{FIND}", "."]\n'
        f'[[goal]]\nname = "look"\ncommand = ["{FIND}", "-name", "x"]\nsafe = true\n'
    )
    told = read_commands(path)
    assert (told.limit_s, told.output_bytes) == (5.0, 4096)
    assert Commands(told, acts=False).goals == ("clean", "look")
