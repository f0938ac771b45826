"""A real run with JSON logs, every log line read."""

import json
import re
from pathlib import Path

from tests.support.run.harness import Training

TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT")


def test_every_line_of_a_log_in_json_names_role_and_run(tmp_path: Path) -> None:
    training = Training(
        tmp_path / "run", "CartPole-v1", "--total-steps", "1000", "--json",
        "--set", "evaluation.episodes=4", "--set", "logs.format=json",
    )  # fmt: skip
    code, _, err = training.end()
    assert code == 0, err
    run = training.summary()["run"]
    for role in ("actor", "broker", "learner", "launcher", "evaluator"):
        (file, *_) = sorted((training.run_dir / "logs").glob(f"{role}*.log"))
        text = file.read_text().splitlines()
        assert [line for line in text if TEXT_LINE.match(line)] == []
        lines = [json.loads(line) for line in text if line.startswith("{")]
        assert {(line["role"], line["run"]) for line in lines} == {(role, run)}
