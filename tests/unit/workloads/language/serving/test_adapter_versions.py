"""Versions of a server of text: which of them the engine holds."""

from pathlib import Path

import pytest

from penstock.registry.records import Traffic
from penstock.registry.routing import Arms
from penstock.workloads.plugin.serving import Weights
from tests.support.language.text_stand import TextStand, adapter, make_model


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_model(tmp_path_factory.mktemp("versions") / "model")


async def test_a_shadow_is_not_held_and_that_is_said(base: Path) -> None:
    stand = TextStand(base)
    for version in (1, 2):
        stand.weights[version] = Weights(version, 1, adapter(base, version))
    traffic = Traffic(policy="default", shadow=2)
    arms = Arms(traffic=traffic, active=1, canary=None, pinned=frozenset())
    assert await stand.versions.steer(arms) == ["shadow=2: a server of text asks none; set it to 0"]
    assert stand.engine.versions == [1]
    choice = stand.versions.choose("ada")
    assert (choice.loaded and choice.loaded.version, choice.shadow) == (1, None)
