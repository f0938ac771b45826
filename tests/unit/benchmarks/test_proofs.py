import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.proofs import (
    DOCS,
    MARKS,
    PROOFS,
    RESULTS,
    Proof,
    Record,
    append,
    missing,
    read,
    run,
    standing,
    thin,
    write,
    written,
)

PROOF = Proof(task="CartPole-v1", algorithm="ppo", seed=1, threshold=475, total_steps=1000)
RECORD = Record(
    task="CartPole-v1",
    algorithm="ppo",
    variant="",
    seed=1,
    command=PROOF.command,
    commit="abc",
    date="2026-01-01",
    machine="2 cores",
    passed=True,
    result={
        "evaluation": {"mean": 500.0},
        "env_steps": 900,
        "training_seconds": 2.5,
        "staleness": {"p50": 1},
    },
    curve=[(0, 20.0), (900, 480.0)],
)


def program(tmp_path: Path, body: str) -> tuple[str, str]:
    """A program that is started as `penstock` would be."""
    path = tmp_path / "program.py"
    path.write_text(f"import json, pathlib, sys\nfolder = pathlib.Path(sys.argv[-1])\n{body}\n")
    return sys.executable, str(path)


def test_entries_are_told_apart_by_task_algorithm_variant_and_seed() -> None:
    assert len({proof.key for proof in PROOFS}) == len(PROOFS)


def test_only_what_is_missing_is_run(tmp_path: Path) -> None:
    path = tmp_path / "results" / "proofs.jsonl"
    second = replace(PROOF, seed=2)
    assert missing([PROOF, second], read(path), retry=False) == [PROOF, second]
    append(path, replace(RECORD, passed=False))
    assert missing([PROOF, second], read(path), retry=False) == [second]
    assert missing([PROOF, second], read(path), retry=True) == [PROOF, second]
    append(path, RECORD)
    assert missing([PROOF, second], read(path), retry=True) == [second]
    assert len(path.read_text().splitlines()) == 2


def test_a_record_proves_only_what_its_command_says(tmp_path: Path) -> None:
    path = tmp_path / "results.jsonl"
    append(path, RECORD)
    assert missing([PROOF], read(path), retry=False) == []
    for changed in (replace(PROOF, threshold=490), replace(PROOF, total_steps=900)):
        assert missing([changed], read(path), retry=False) == [changed]


@pytest.mark.parametrize("algorithm", ["impala", "reinforce"])
def test_a_proof_of_another_algorithm_names_it(algorithm: str) -> None:
    assert f"--set algorithm.name={algorithm}" in replace(PROOF, algorithm=algorithm).command
    assert "algorithm.name" not in PROOF.command


@pytest.mark.parametrize(("mean", "passed"), [(475.0, True), (474.9, False)])
def test_a_run_passes_by_its_evaluation(tmp_path: Path, mean: float, *, passed: bool) -> None:
    body = f"""
folder.mkdir()
rows = [{{"env_steps": n, "mean_return": n and 1.0 * n}} for n in range(3)]
(folder / "metrics.jsonl").write_text("\\n".join(map(json.dumps, rows)))
print(json.dumps({{"solved": True, "evaluation": {{"mean": {mean}}}, "env_steps": 2, \
"training_seconds": 1.0}}))
"""
    record = run(PROOF, program(tmp_path, body))
    assert record.passed is passed
    assert record.curve == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert (
        record.command == "penstock train CartPole-v1 --seed 1 --target-return 475 --total-steps 1000 --json"
    )


def test_what_must_not_be_learned_passes_below_its_bound() -> None:
    bounded = replace(PROOF, at_most=20.0)
    assert [bounded.passes(mean) for mean in (19.0, 20.0, 20.1, None)] == [True, True, False, False]
    assert [PROOF.passes(mean) for mean in (474.9, 475.0, None)] == [False, True, False]
    assert (bounded.wanted, PROOF.wanted) == ("≤ 20", "≥ 475")


def test_a_run_that_fails_is_recorded_with_its_last_line(tmp_path: Path) -> None:
    record = run(PROOF, program(tmp_path, "print('cause', file=sys.stderr); sys.exit(1)"))
    assert not record.passed
    assert record.result == {"exit": 1, "error": "cause"}


def test_the_page_shows_what_stands_and_what_is_missing(tmp_path: Path) -> None:
    proofs = [replace(PROOF, seed=seed) for seed in (1, 2, 3)]
    records = {RECORD.key: RECORD}
    failed = replace(RECORD, seed=2, passed=False, result={"exit": 1, "error": "x"})
    records[failed.key] = failed
    (tmp_path / "algorithms.md").write_text("before\n" + "earlier results\n".join(MARKS) + "behind\n")
    write(proofs, records, tmp_path)
    page = (tmp_path / "algorithms.md").read_text()
    assert page.startswith("before\n")
    assert page.endswith("behind\n")
    assert "earlier results" not in page
    assert "| CartPole-v1 | `ppo` | ≥ 475 within 1,000 | 1 of 3 | 500.0 | 900 | 2.5 | Gymnasium" in page
    assert "- CartPole-v1, `ppo`: not run: seed 3; not passed: seed 2" in page
    assert "# seeds 1, 2, 3\npenstock train CartPole-v1 --seed 1 " in page
    assert (tmp_path / "images" / "proofs.png").read_bytes().startswith(b"\x89PNG")


def test_a_curve_is_thinned_with_both_ends() -> None:
    points = [(n, float(n)) for n in range(10_000)]
    thinned = thin(points)
    assert len(thinned) == 60
    assert (thinned[0], thinned[-1]) == (points[0], points[-1])
    assert thin(points[:5]) == points[:5]


def test_the_checked_in_page_is_the_one_that_its_records_give() -> None:
    page = (DOCS / "algorithms.md").read_text()
    assert written(page, PROOFS, standing(PROOFS, read(RESULTS))) == page
