from pathlib import Path

from benchmarks import staleness


def test_a_run_whose_experience_lags_is_measured_and_drawn(tmp_path: Path) -> None:
    """Both objectives start from the same experience; a lag other than the one asked for would raise."""
    runs = [staleness.train(objective, 8, 1, total_steps=12_000) for objective in staleness.OBJECTIVES]
    assert [run.key for run in runs] == [("decoupled", 8, 1), ("coupled", 8, 1)]
    assert all(run.updates > 8 for run in runs)
    assert runs[0].curve[0] == runs[1].curve[0]
    staleness.draw(runs, tmp_path / "staleness.png")
    assert (tmp_path / "staleness.png").read_bytes().startswith(b"\x89PNG")


def test_every_run_of_the_ablation_is_checked_in(tmp_path: Path) -> None:
    """Both objectives, every staleness, every seed; an absent file holds nothing."""
    expected = {
        (o, n, seed) for o in staleness.OBJECTIVES for n in staleness.STALENESS for seed in staleness.SEEDS
    }
    assert staleness.read(staleness.DOCS / "staleness.jsonl").keys() == expected
    assert staleness.read(tmp_path / "none.jsonl") == {}
