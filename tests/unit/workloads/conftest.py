"""A tiny language model in a folder, made once."""

from pathlib import Path

import pytest

from tests.support.language.tiny_models import make_base


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_base(tmp_path_factory.mktemp("tiny") / "base")
