"""A run that has ended keeps what it knows, whatever becomes of an attempt to go on with it."""

import shutil
import signal
import subprocess
from pathlib import Path

import pytest

from penstock.launch.run.supervisor import penstock
from tests.support.run.harness import PATIENCE_S, Training

KNOWN = ("config.toml", "learner.json", "summary.json", "metrics.jsonl")
SMALL = (
    "CartPole-v1", "--actors", "1", "--total-steps", "4000", "--target-return", "15",
    "--set", "evaluation.episodes=2", "--set", "learner.stop_at_target=false",
)  # fmt: skip


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of a run that has ended; tests that let something happen to it take a copy."""
    training = Training(tmp_path_factory.mktemp("ended") / "run", *SMALL)
    try:
        code, _, err = training.end()
    finally:
        training.process.kill()
    assert code == 0, err
    return training.run_dir


def content(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder: when it was written, and what it holds."""
    files = (file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): (file.stat().st_mtime_ns, file.read_bytes()) for file in files}


@pytest.mark.promise("refused-resume-writes-nothing")
@pytest.mark.parametrize(
    ("said", "key"),
    [
        ("environment.id=Acrobot-v1", "environment"),
        ("actor.unroll_length=7", "actor.unroll_length"),
        ("run=other", "run"),
        ("policy.hidden_sizes=[8]", "policy"),
    ],
)
def test_a_refused_resume_writes_nothing(said: str, key: str, ended: Path) -> None:
    before = content(ended)
    done = subprocess.run(
        penstock("train", "--resume", str(ended), "--set", said),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert done.stderr.startswith(f"{key}=")
    assert done.stdout == ""
    assert content(ended) == before


def test_a_file_in_place_of_a_folder_ends_the_run_with_its_name(ended: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    shutil.rmtree(folder / "policies")
    (folder / "policies").write_text("somebody's")
    done = subprocess.run(
        penstock("train", "--resume", str(folder), "--total-steps", "8000"),
        capture_output=True, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"learner cannot use {folder / 'policies'}"), done.stderr
    assert "move it away" in last
    assert (folder / "policies").read_text() == "somebody's"


def resumed_until(folder: Path, words: str, *arguments: str) -> tuple[int, str]:
    """Resume, and press Ctrl-C when the launcher has said this; exit code and error output."""
    process = subprocess.Popen(
        penstock("train", "--resume", str(folder), *arguments),
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        assert any(words in line for line in process.stdout)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    return process.returncode, err


@pytest.mark.promise("refused-resume-writes-nothing")
def test_an_attempt_that_learned_nothing_leaves_what_the_run_knows(ended: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    before = content(folder)
    code, err = resumed_until(folder, ": starting ", "--total-steps", "100000000", "--seed", "7")
    assert code == 130, err
    after = content(folder)
    assert {name: after[name] for name in KNOWN} == {name: before[name] for name in KNOWN}
    assert "summary.json is as it was" in err
    assert "config.next.toml" not in after


def test_an_attempt_that_learned_makes_its_settings_the_runs(ended: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(ended, tmp_path / "run"))
    code, err = resumed_until(folder, " training", "--total-steps", "100000000", "--actors", "2")
    assert code == 130, err
    assert "count = 2\n" in (folder / "config.toml").read_text().partition("[actor]")[2].partition("\n\n")[0]
    assert not (folder / "config.next.toml").exists()
    assert '"interrupted": true' in (folder / "summary.json").read_text()
