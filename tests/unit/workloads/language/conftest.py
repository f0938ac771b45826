"""A model that knows a dialogue by heart, and a server of text over it."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.language.text_stand import TextStand, make_model, running


@pytest.fixture(scope="session")
def dialogue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's folder."""
    return make_model(tmp_path_factory.mktemp("dialogue") / "model")


@pytest.fixture
async def stand(dialogue: Path) -> AsyncIterator[TextStand]:
    """With version 1, and its engine running."""
    async with running(TextStand(dialogue)) as made:
        yield made
