"""Trackers get every line under its names, and whatever they do the learner goes on."""

import threading
from collections.abc import Mapping
from pathlib import Path

import pytest

from penstock.config.settings import ConfigurationError, Settings, load
from penstock.learner.recorder import (
    QUEUE_LINES,
    Recorder,
    Staleness,
    Tracking,
    check_installed,
    configuration,
    make_tracking,
)
from penstock.runtime import metrics
from tests.support.run.harness import eventually

tensorboard = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")


PATIENCE_S = 60.0
ROWS = [
    {"time": 1000.0 + n, "env_steps": 64 * n, "mean_return": float(n), "entropy": None, "loss": float("nan")}
    for n in range(1, 4)
]


class Kept:
    """A tracker that keeps what it gets; raises at some steps, and waits for `gate` before each."""

    def __init__(self, bad_steps: tuple[int, ...] = (), gate: threading.Event | None = None) -> None:
        self.rows: list[tuple[int, float, dict[str, float]]] = []
        self.closed = threading.Event()
        self._bad, self._gate = bad_steps, gate

    def write(self, step: int, at: float, values: Mapping[str, float]) -> None:
        if self._gate is not None:
            self._gate.wait()
        if step in self._bad:
            raise OSError("no space left on device")
        self.rows.append((step, at, dict(values)))

    def close(self) -> None:
        self.closed.set()


def failures(name: str) -> float:
    return float(metrics.TRACKER_FAILURES.labels(name)._value.get())


def tracking_of(run_dir: Path, *trackers: str, first_step: int = 0) -> Tracking:
    given = {
        "metrics": {"trackers": trackers, "wandb_mode": "offline"},
        "broker": {"redis": "redis://u@far:1"},
    }
    secret = {"run": "tracked-1", "security": {"redis_password": "secret"}}
    return make_tracking(load([given, secret]), run_dir, first_step=first_step)


def scalars(run_dir: Path, name: str) -> list[tuple[int, float]]:
    reader = tensorboard.EventAccumulator(str(run_dir / "tensorboard"))
    reader.Reload()
    return [(event.step, event.value) for event in reader.Scalars(name)]


def test_a_line_refused_by_a_tracker_is_counted_and_the_next_is_offered() -> None:
    bad, good, before = Kept(bad_steps=(128,)), Kept(), failures("wandb")
    tracking = Tracking({"wandb": lambda: bad, "tensorboard": lambda: good})
    for row in ROWS:
        tracking.offer(row)
    tracking.close()
    assert [step for step, _, _ in bad.rows] == [64, 192]
    assert good.rows == [(64 * n, 1000.0 + n, {"mean_return": float(n)}) for n in range(1, 4)], (
        "numbers alone"
    )
    assert good.closed.is_set()
    assert failures("wandb") - before == 1


def test_a_hung_tracker_delays_no_update() -> None:
    gate, before = threading.Event(), failures("wandb")
    hanging = Kept(gate=gate)
    tracking = Tracking({"wandb": lambda: hanging})
    for n in range(QUEUE_LINES + 50):
        tracking.offer({"time": 0.0, "env_steps": n, "x": 1.0})
    lost = failures("wandb") - before
    assert 49 <= lost <= 50
    tracking._feeds[0].end()
    gate.set()
    tracking._feeds[0]._thread.join()
    assert hanging.closed.is_set()


def test_a_tracker_that_cannot_be_opened_loses_only_its_lines(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("in the way")
    before = failures("tensorboard")
    tracking = tracking_of(tmp_path, "tensorboard")
    for row in ROWS:
        tracking.offer(row)
    tracking.close()
    assert failures("tensorboard") - before == len(ROWS)
    recorder = Recorder(tmp_path, Staleness(), 0, tracking)
    recorder.finish({"run": "tracked-1"})
    assert (tmp_path / "learner.json").exists()


def test_tensorboard_reads_the_written_values(tmp_path: Path) -> None:
    first = tracking_of(tmp_path, "tensorboard")
    for row in ROWS:
        first.offer(row)
    first.close()
    assert scalars(tmp_path, "mean_return") == [(64, 1.0), (128, 2.0), (192, 3.0)]
    again = tracking_of(tmp_path, "tensorboard", first_step=128)
    again.offer({"time": 2000.0, "env_steps": 160, "mean_return": 7.0})
    again.close()
    assert scalars(tmp_path, "mean_return") == [(64, 1.0), (160, 7.0)]


def test_wandb_reads_the_values_written_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from tests.support.run.wandb_file import history

    for folder in ("DATA", "CACHE", "CONFIG"):
        monkeypatch.setenv(f"WANDB_{folder}_DIR", str(tmp_path))
    before = failures("wandb")
    tracking = tracking_of(tmp_path, "wandb")
    for row in ROWS:
        tracking.offer(row)
    tracking._feeds[0].end()
    tracking._feeds[0]._thread.join()
    assert failures("wandb") == before
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    # Its own process writes the file, and is not waited for to the end.
    eventually(lambda: len(history(file)) == len(ROWS), "every row in the file", PATIENCE_S)
    rows = history(file)
    assert [(row["env_steps"], row["mean_return"]) for row in rows] == [(64, 1.0), (128, 2.0), (192, 3.0)]
    written = [path.read_bytes() for path in (tmp_path / "wandb").rglob("*") if path.is_file()]
    assert not any(b"secret" in content for content in written)


def test_trackers_get_the_configuration_without_secrets_and_addresses() -> None:
    content = configuration(Settings())
    assert "security" not in content
    assert "redis" not in content["broker"]
    assert "listen" not in content["serving"]
    assert "url" not in content["registry"]
    assert content["algorithm"]["batch_steps"] == 2048


def test_a_tracker_that_is_not_installed_is_refused_with_its_extra() -> None:
    with pytest.raises(ConfigurationError, match=r"pip install 'penstock-rl\[no_such_tracker\]'"):
        check_installed(["no_such_tracker"])
    with pytest.raises(ConfigurationError, match=r"metrics\.trackers"):
        load([{"metrics": {"trackers": ["mlflow"]}}])
