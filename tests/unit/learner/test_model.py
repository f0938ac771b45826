"""What a learner refuses before it begins."""

from dataclasses import replace

import numpy as np
import pytest

from learner.model import check_specification, make_model
from penstock.runtime import settings as configuration
from penstock.runtime.settings import ConfigurationError
from penstock.wire.spaces import Box
from tests import small_run


def test_a_fragment_that_no_message_holds_is_refused_with_the_length_that_fits() -> None:
    """Of 4096 environments that observe four numbers."""
    made = configuration.load(
        [{"run": "a", "environment": {"count": 4096}, "actor": {"unroll_length": 4096}}]
    )
    with pytest.raises(ConfigurationError, match=r"unroll_length=4096.*holds \d+; use \d+") as error:
        make_model(made)
    fits = int(str(error.value).rpartition(" ")[2])
    assert 1 < fits < 4096


def test_a_specification_that_no_reply_holds_is_refused() -> None:
    """Bounds of every pixel as numbers: actors would ask for it for ever."""
    pixels = np.zeros((1024, 1024), np.float32)
    large = replace(small_run.specification(), observation_space=Box(pixels, pixels + 1))
    with pytest.raises(ConfigurationError, match=r"specification has 8\d+ bytes.*smaller"):
        check_specification(large)
