from pathlib import Path

import pytest

from benchmarks import staleness
from benchmarks.proof_records import RESULTS


@pytest.mark.parametrize(
    ("task", "steps"), [("CartPole-v1", 8_000), pytest.param("Acrobot-v1", 20_000, marks=pytest.mark.slow)]
)
def test_a_run_whose_experience_lags_is_measured_and_drawn(task: str, steps: int, tmp_path: Path) -> None:
    """Both objectives start from the same experience; a lag other than the one asked for would raise."""
    runs = [staleness.train(task, objective, 4, 1, total_steps=steps) for objective in staleness.OBJECTIVES]
    assert [run.key for run in runs] == [(task, "decoupled", 4, 1), (task, "coupled", 4, 1)]
    assert all(run.updates > 4 for run in runs)
    assert runs[0].curve[0] == runs[1].curve[0]
    staleness.draw(runs, tmp_path)
    for name in ("staleness.png", "staleness-curves.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


def test_every_run_that_is_checked_in_is_one_of_the_ablation(tmp_path: Path) -> None:
    """Both objectives, every staleness, every seed, once; an absent file holds nothing."""
    held = staleness.read(RESULTS / "staleness.jsonl")
    assert held
    assert held.keys() <= set(staleness.keys())
    assert len(staleness.keys()) == len(set(staleness.keys())) == 2 * 2 * 7 * 3
    assert staleness.read(tmp_path / "none.jsonl") == {}
