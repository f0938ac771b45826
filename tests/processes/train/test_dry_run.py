"""`penstock train --dry-run` end to end: real processes, and the run that was predicted."""

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.run.child_process import penstock
from tests.support.run.training import PATIENCE_S, is_alive

TINY = (
    "CartPole-v1", "--actors", "1", "--total-steps", "4000", "--set", "learner.stop_at_target=false",
    "--set", "evaluation.episodes=4", "--set", "algorithm.batch_steps=512",
)  # fmt: skip


def said(*arguments: str, cwd: Path) -> "subprocess.CompletedProcess[str]":
    """`penstock train` of the tiny run, to its end."""
    return subprocess.run(
        penstock("train", *TINY, *arguments),
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
        cwd=cwd,
    )


def test_a_run_is_predicted_trained_and_compared(tmp_path: Path) -> None:
    """Steps, time, memory and disk as ranges; the summary of the run has them beside what came."""
    folder = str(tmp_path / "run")
    told = said("--dry-run", "--json", "--run-dir", folder, cwd=tmp_path)
    assert told.returncode == 0, told.stderr
    predicted = json.loads(told.stdout)
    assert predicted["total_steps"] == 4000
    for name in ("seconds", "memory_bytes", "disk_bytes"):
        figure = predicted[name]
        assert 0 < figure["low"] <= figure["likely"] <= figure["high"]
    assert predicted["fits"]
    assert predicted["scores"]["returns"]["count"] > 0
    assert predicted["essentials"]["update_steps"] == 512
    assert predicted["memory_bytes_by_role"].keys() == {
        *("redis", "broker", "learner", "actor", "evaluator", "launcher"),
    }
    assert all(predicted["memory_bytes_by_role"].values())
    # Nothing is left of it but what it found.
    assert [place.name for place in tmp_path.iterdir()] == ["run"]
    assert [place.name for place in (tmp_path / "run").iterdir()] == ["dry-run.json"]
    done = said("--json", "--run-dir", folder, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    compared = summary["dry_run"]
    assert compared["note"] == ""
    assert compared["time"]["predicted"] == predicted["seconds"]
    assert compared["time"]["actual"] == summary["wall_seconds"]
    assert compared["memory"]["predicted"] == predicted["memory_bytes"]
    assert compared["memory"]["actual"] == summary["peak_memory_bytes"]
    # Memory does not depend on how busy this machine is.
    assert abs(compared["memory"]["error"]) < 0.15
    assert compared["disk"]["actual"] == summary["disk_bytes"]
    assert summary == json.loads((tmp_path / "run/summary.json").read_text())


@pytest.fixture
def dry_run(tmp_path: Path) -> Iterator["subprocess.Popen[str]"]:
    """One that is under way, of far more steps; its figures go where nothing is yet."""
    process = subprocess.Popen(
        penstock("train", *TINY, "--dry-run", "--set", "learner.total_steps=100000000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        start_new_session=True,
    )
    yield process
    process.kill()
    process.communicate()


def test_ctrl_c_leaves_no_process_and_no_folder(dry_run: "subprocess.Popen[str]", tmp_path: Path) -> None:
    """In the middle of a calibration, whose processes are up."""
    assert dry_run.stdout is not None
    pids: set[int] = set()
    for line in dry_run.stdout:
        if " is up (pid " in line:
            pids.add(int(line.rpartition("(pid ")[2].rstrip(")\n")))
        if line.rstrip().endswith(" training"):
            break
    assert len(pids) >= 4
    os.kill(dry_run.pid, signal.SIGINT)
    _, err = dry_run.communicate(timeout=PATIENCE_S)
    assert dry_run.returncode == 130
    assert "interrupted" in err
    pause = threading.Event()
    while any(map(is_alive, pids)):
        pause.wait(0.05)
    assert list(tmp_path.iterdir()) == []


def test_what_will_not_fit_is_refused(tmp_path: Path) -> None:
    """By a machine that says it has 64 MiB left: exit 1, the last line names figure, limit and remedy."""
    code = (
        "import sys; from pathlib import Path; import launch.dry_run.limits as limits, launch.run.memory as "
        f"memory;limits.available = lambda: memory.available(Path({str(tmp_path / 'small')!r}));from "
        "launch.cli.app import app; app()"
    )
    (tmp_path / "small/proc").mkdir(parents=True)
    (tmp_path / "small/proc/meminfo").write_text("MemAvailable: 65536 kB\n")
    told = subprocess.run(
        [sys.executable, "-c", code, "train", *TINY, "--dry-run", "--run-dir", str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=4 * PATIENCE_S,
        check=False,
    )
    assert told.returncode == 1, told.stderr
    last = told.stderr.splitlines()[-1]
    assert last.startswith("it will not fit: memory: ")
    assert "64.0 MiB there (MemAvailable of /proc/meminfo): start fewer actors (--actors)" in last
    assert not json.loads((tmp_path / "run/dry-run.json").read_text())["fits"]


@pytest.mark.parametrize(
    ("more", "named"),
    [(("--from", "{folder}"), "--dry-run --from"), (("--serve", "127.0.0.1:0"), "--dry-run --serve")],
)
def test_what_has_no_pace_of_its_own_is_bad_usage(more: tuple[str, ...], named: str, tmp_path: Path) -> None:
    """Exit 2, at once, with nothing started."""
    (tmp_path / "recording").mkdir()
    (tmp_path / "recording/recording.json").write_text("{}")
    told = said("--dry-run", *(word.format(folder=tmp_path / "recording") for word in more), cwd=tmp_path)
    assert told.returncode == 2
    assert named in told.stderr.splitlines()[-1]


def test_a_run_that_is_resumed_is_not_predicted(tmp_path: Path) -> None:
    """It has said itself what it takes."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run/config.toml").write_text('run = "r"\n')
    call = penstock("train", "--resume", str(tmp_path / "run"), "--dry-run")
    told = subprocess.run(call, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert told.returncode == 2
    assert "--dry-run --resume" in told.stderr.splitlines()[-1]
