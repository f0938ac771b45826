"""Settings of a run of thoughts before a person says any."""

from pathlib import Path

import pytest
import torch

from penstock.config.service_settings import learner_settings
from penstock.learner.model import device_of


def test_thoughts_are_learned_on_the_processor_beside_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings = learner_settings(Path("penstock/recipes/thoughts-tiny.toml"), ())
    assert device_of(settings).type == "cpu"
