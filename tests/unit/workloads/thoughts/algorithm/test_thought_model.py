"""What a run of thoughts learns with, and the line of its log that says so."""

import logging
import tomllib
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from penstock.config.service_settings import over_defaults
from penstock.learner.algorithms.rows import RankGroup
from penstock.training import lay_over
from penstock.workloads.thoughts import WORKLOAD
from penstock.workloads.thoughts.reinforce import make_thought_model
from tests.support.thoughts.small_thoughts import small_base

RECIPE: Final = Path(__file__).resolve().parents[5] / "penstock" / "recipes" / "thoughts-tiny.toml"


def told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, **over: dict[str, Any]
) -> tuple[dict[str, str], Any]:
    """The words of the line, and the algorithm, of the recipe over an untrained model of six symbols."""
    said = tomllib.loads(RECIPE.read_text())
    kwargs = {"model": str(small_base(tmp_path / "base")), "task": "rings:6:3"}
    lay_over(said, {"environment": {"kwargs": kwargs}, "policy": {"kwargs": {**kwargs, "lora": False}}})
    del said["policy"]["kwargs"]["task"]
    lay_over(said, over)
    with caplog.at_level(logging.INFO):
        model = make_thought_model(over_defaults([said]), WORKLOAD, RankGroup(), torch.device("cpu"))
    (line,) = (one for one in caplog.records if one.message == "thoughts are learned")
    return vars(line), model.algorithm


def test_a_run_says_in_one_line_what_is_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    line, algorithm = told(tmp_path, caplog)
    assert algorithm.rejection == "theatre"
    assert line["baseline"] == "group"
    assert line["advantage"] == "return"
    assert line["schedule"] == "cosine, 0.001 to a share of 0.1, 0 updates of warm-up"
    assert line["entropy"] == "0.01 × 0.9995 an update, at least 0.001"
    assert (line["kl"], line["patience"]) == ("off", "off")
    assert line["answer_without_thought"] == "λ₀ 1.0"
    assert line["validation"] == "every 50 updates on 256 questions, theatre ends it after 150"


def test_it_says_what_is_off_and_how_what_is_on_is_set(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    line, _ = told(
        tmp_path,
        caplog,
        algorithm={
            "baseline": "both", "baseline_layers": 4, "baseline_reads": "pooled", "advantage": "gae",
            "entropy_coefficient": 0.0, "kl_coefficient": 0.1, "direct_coefficient": 0.0, "validate_every": 0,
        },
        evaluation={"patience": 3, "min_improvement": 0.01},
    )  # fmt: skip
    assert line["baseline"] == "both, 4 layers of 256, pooled"
    assert line["advantage"] == "gae, λ 0.95"
    assert (line["entropy"], line["validation"], line["answer_without_thought"]) == ("off", "off", "off")
    assert line["kl"] == "0.1 to the start"
    assert line["patience"] == "3 evaluations, by 0.01"
