"""Fixtures of tests of the API of prompts."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.prompts.small_prompts import SmallPrompts, small_prompts


@pytest.fixture
def prompts(short_folder: Path) -> Iterator[SmallPrompts]:
    """The API over a policy server, each anew."""
    with small_prompts(short_folder) as made:
        yield made
