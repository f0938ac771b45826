"""What a learner refuses before it begins."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from learner.model import check_memory, check_schema, check_specification, make_model
from penstock.runtime import settings as configuration
from penstock.runtime.settings import ConfigurationError, EnvironmentSection
from penstock.wire.limits import MIB
from penstock.wire.schema import fragment_schema
from penstock.wire.spaces import Box, Dict, Discrete
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


def test_actors_are_told_to_shape_rewards_with_the_discount_that_is_learned_with() -> None:
    """Where the wrapper names none; a potential that is not there is refused."""
    wrappers = [{"shape": "math:fabs"}, {"shape": "math:fabs", "discount": 0.5}, {"scale": 2.0}]
    made = configuration.load(
        [{"run": "a", "environment": {"reward": wrappers}, "algorithm": {"discount": 0.875}}]
    )
    told = EnvironmentSection.model_validate_json(make_model(made).specification.environment_json)
    assert [one.discount for one in told.reward] == [0.875, 0.5, None]
    made = configuration.load([{"run": "a", "environment": {"reward": [{"shape": "math:potential"}]}}])
    with pytest.raises(
        ConfigurationError, match=r"environment\.reward: shape='math:potential' cannot be loaded"
    ):
        make_model(made)


def test_a_specification_that_no_reply_holds_is_refused() -> None:
    """Bounds of every pixel as numbers: actors would ask for it for ever."""
    pixels = np.zeros((1024, 1024), np.float32)
    large = replace(small_run.specification(), observation_space=Box(pixels, pixels + 1))
    with pytest.raises(ConfigurationError, match=r"specification has 8\d+ bytes.*smaller"):
        check_specification(large)


def test_an_observation_of_more_parts_than_a_fragment_has_tensors_is_refused() -> None:
    """Not by the broker, at the first fragment."""
    space = Dict(tuple((f"part-{index}", Discrete(2)) for index in range(30)))
    with pytest.raises(ConfigurationError, match="68 tensors.*at most 64"):
        check_schema(fragment_schema(space, Discrete(2)))


def test_weights_that_do_not_fit_below_maxmemory_are_refused_with_the_figures() -> None:
    """Three versions, two that are evaluated, 16 that the registry keeps and a copy of one; log, staging and reserve."""
    made = configuration.load([{"run": "a", "broker": {"max_log_bytes": 100 * MIB, "max_staged_bytes": MIB}}])
    needed = (100 + 1 + (3 + 2 + 16 + 1) * 10 + 64) * MIB
    check_memory(made, 10 * MIB, needed)
    check_memory(made, 10 * MIB, 0)
    with pytest.raises(ConfigurationError, match=f"maxmemory={needed - 1}.*need {needed}"):
        check_memory(made, 10 * MIB, needed - 1)


@pytest.mark.parametrize("key", ["environment.count", "evaluation.episodes"])
def test_more_environments_or_episodes_than_a_message_may_name_are_refused(key: str) -> None:
    """Not by the broker, at the first fragment or report."""
    with pytest.raises(ConfigurationError, match=f"{key}=4097.*4096"):
        configuration.load([configuration.parse_assignment(f"{key}=4097")])


def test_where_a_learner_keeps_its_journals_is_told_to_no_actor(tmp_path: Path) -> None:
    """The specification goes to machines of others; it named a folder of this one."""
    made = configuration.load(
        [{"run": "a", "environment": {"id": "CartPole-v1"}, "actor": {"ack_journal": str(tmp_path)}}]
    )
    specification = make_model(made).specification
    assert str(tmp_path) not in specification.actor_json
    assert str(tmp_path).encode() not in specification.encode()
