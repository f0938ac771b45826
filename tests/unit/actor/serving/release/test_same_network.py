"""Weights fit another run where its network is the same, wherever its base model lies."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.actor.serving.release import is_same_network
from penstock.protocol.specification import RunSpecification
from tests.support.run.small_run import specification


def made_of(model: object, **kwargs: Any) -> RunSpecification:
    """A run whose policy is an adapter of a model."""
    return replace(
        specification(), policy_json=json.dumps({"kwargs": {"model": str(model), "rank": 4, **kwargs}})
    )


def base(folder: Path, weights: bytes = b"weights", **files: str) -> Path:
    """The folder of a base model."""
    (folder / "tokenizer").mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(weights)
    (folder / "tokenizer" / "words.json").write_text("{}")
    for name, text in files.items():
        (folder / name).write_text(text)
    return folder


def test_the_same_files_are_the_same_base_model(tmp_path: Path) -> None:
    one, other = base(tmp_path / "one"), base(tmp_path / "other")
    assert is_same_network(made_of(one), made_of(other))
    assert is_same_network(made_of("hub/name"), made_of("hub/name"))


@pytest.mark.parametrize("said", [{"weights": b"wrights"}, {"more": "a"}])
def test_other_files_are_another_base_model(tmp_path: Path, said: dict[str, Any]) -> None:
    one, other = base(tmp_path / "one"), base(tmp_path / "other", **said)
    assert not is_same_network(made_of(one), made_of(other))
    assert not is_same_network(made_of(one), made_of(tmp_path / "gone"))
    assert not is_same_network(made_of(one), made_of("hub/name"))


def test_other_settings_are_another_network(tmp_path: Path) -> None:
    one = base(tmp_path / "one")
    assert not is_same_network(made_of(one), made_of(one, rank=8))
    assert not is_same_network(made_of(one), made_of(one, lora=False))
    assert not is_same_network(made_of(one), replace(made_of(one), workload="rlhf"))
