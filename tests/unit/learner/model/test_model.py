"""What a learner refuses before it begins."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import gymnasium
import numpy as np
import pytest

from penstock.config import settings as configuration
from penstock.config.settings import (
    ConfigurationError,
    EnvironmentSection,
    OnPolicySection,
    PolicySection,
    Settings,
)
from penstock.learner.algorithms.registry import ALGORITHMS, check_hardware
from penstock.learner.model import check_memory, check_schema, check_specification, make_model
from penstock.protocol.limits import MIB
from penstock.protocol.schema import Axes, fragment_schema
from penstock.protocol.spaces import Box, Dict, Discrete
from penstock.workloads.control.environment import spaces
from tests.support.run import small_run


def test_a_fragment_that_no_message_holds_is_refused_with_the_length_that_fits() -> None:
    made = configuration.load(
        [{"run": "a", "environment": {"count": 4096}, "actor": {"unroll_length": 4096}}]
    )
    with pytest.raises(ConfigurationError, match=r"unroll_length=4096.*holds \d+; use \d+") as error:
        make_model(made)
    fits = int(str(error.value).rpartition(" ")[2])
    assert 1 < fits < 4096


def test_actors_are_told_to_shape_rewards_with_the_discount_that_is_learned_with() -> None:
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


def test_arguments_that_a_policy_has_not_are_refused() -> None:
    made = configuration.load([{"run": "a", "policy": {"kwargs": {"model": "base"}}}])
    with pytest.raises(ConfigurationError, match=r"policy\.kwargs=\{'model': 'base'\}: .*takes none"):
        make_model(made)


def test_an_algorithm_of_tokens_learns_no_single_steps() -> None:
    made = configuration.load([{"run": "a", "algorithm": {"name": "token_ppo"}}])
    with pytest.raises(
        ConfigurationError, match=r"algorithm\.name='token_ppo': does not .*acts step by step; use clone or"
    ):
        make_model(made)


def test_a_specification_that_no_reply_holds_is_refused() -> None:
    pixels = np.zeros((1024, 1024), np.float32)
    large = replace(small_run.specification(), observation_space=Box(pixels, pixels + 1))
    with pytest.raises(ConfigurationError, match=r"specification has 8\d+ bytes.*smaller"):
        check_specification(large)


def test_an_observation_of_more_parts_than_a_fragment_has_tensors_is_refused() -> None:
    space = Dict(tuple((f"part-{index}", Discrete(2)) for index in range(30)))
    with pytest.raises(ConfigurationError, match="68 tensors.*at most 64"):
        check_schema(fragment_schema(space, Discrete(2)))


@pytest.mark.promise("learner-reads-once-bounded")
def test_weights_that_do_not_fit_below_maxmemory_are_refused_with_the_figures() -> None:
    made = configuration.load([{"run": "a", "broker": {"max_log_bytes": 100 * MIB, "max_staged_bytes": MIB}}])
    needed = (100 + 1 + (3 + 4 + 2 + 16 + 1) * 10 + 16 + 64) * MIB
    check_memory(made, 10 * MIB, needed)
    check_memory(made, 10 * MIB, 0)
    with pytest.raises(ConfigurationError, match=f"maxmemory={needed - 1}.*need {needed}"):
        check_memory(made, 10 * MIB, needed - 1)


@pytest.mark.parametrize("key", ["environment.count", "evaluation.episodes"])
def test_more_environments_or_episodes_than_a_message_may_name_are_refused(key: str) -> None:
    with pytest.raises(ConfigurationError, match=f"{key}=4097.*4096"):
        configuration.load([configuration.parse_assignment(f"{key}=4097")])


@pytest.mark.parametrize("name", ["ppo", "impala", "reinforce"])
@pytest.mark.parametrize("staleness", [0, 3])
def test_the_specification_tells_what_the_algorithm_paces_by(name: str, staleness: int) -> None:
    section = {"name": name, "staleness": staleness, "batch_steps": 512}
    model = make_model(configuration.load([{"run": "a", "algorithm": section}]))
    told = model.specification
    assert (told.lock_step, told.update_steps, told.stale_after) == (
        staleness == 0, 512, 4 * (staleness + 1)
    )  # fmt: skip
    expected: Any = ALGORITHMS[name]
    assert type(model.algorithm) is expected
    assert model.pacing.budget == 512 * (staleness + 1)


def test_where_a_learner_keeps_its_journals_is_told_to_no_actor(tmp_path: Path) -> None:
    made = configuration.load(
        [{"run": "a", "environment": {"id": "CartPole-v1"}, "actor": {"ack_journal": str(tmp_path)}}]
    )
    specification = make_model(made).specification
    assert str(tmp_path) not in specification.actor_json
    assert str(tmp_path).encode() not in specification.encode()


def replaying(**algorithm: object) -> Settings:
    """CartPole with DQN, fragments of 8 × 32 steps."""
    return configuration.load(
        [{"run": "a", "environment": {"id": "CartPole-v1"}, "algorithm": {"name": "dqn", **algorithm}}]
    )


@pytest.mark.promise("fragments-kept-replay-trimmed")
def test_a_log_that_cannot_hold_what_replay_keeps_is_refused_with_the_figures() -> None:
    make_model(replaying())
    with pytest.raises(
        ConfigurationError, match=r"max_log_bytes=536870912.*replay \d+ bytes.*: \d+ bytes and"
    ):
        make_model(replaying(capacity_bytes=512 * MIB))
    with pytest.raises(
        ConfigurationError, match=r"max_log_entries=1000000.*in at most 1000000.*10000\d\d entries"
    ):
        make_model(replaying(capacity=1_000_000))


def test_what_the_log_may_hold_is_counted_beside_replay() -> None:
    one, other = (make_model(replaying(capacity_bytes=size * MIB)).room for size in (100, 150))
    assert 50 * MIB <= one.size - other.size <= 67 * MIB


@pytest.mark.parametrize(
    ("algorithm", "message"),
    [
        ({"error_steps": 100}, r"error_steps=100: with fragments of 256 steps.*give at least 256"),
        ({"capacity": 1100}, r"capacity=1100: .*give at least 1256"),
        ({"capacity_bytes": 1000}, r"capacity_bytes=1000: a fragment alone has \d+"),
    ],
)
def test_a_rate_that_would_block_for_good_is_refused_at_start(
    algorithm: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_model(replaying(**algorithm))


def test_actors_are_told_the_policy_that_the_algorithm_needs() -> None:
    made = make_model(replaying())
    told = PolicySection.model_validate_json(made.specification.policy_json)
    assert (told.discrete, told.shared_trunk) == ("epsilon_greedy", True)
    assert made.specification.stale_after == made.specification.update_steps == 0


STATE: dict[str, tuple[dict[str, Any], str]] = {
    "burn-in of nothing": (
        {"policy": {"burn_in": 4}},
        r"policy\.burn_in=4: policy\.recurrent='none' has no state to refresh",
    ),
    "burn-in of everything": (
        {"policy": {"burn_in": 32, "recurrent": "lstm"}},
        r"policy\.burn_in=32: nothing is left to learn from of actor\.unroll_length=32",
    ),
    "masks of real numbers": (
        {"environment": {"id": "Pendulum-v1", "mask_key": "action_mask"}},
        r"environment\.mask_key='action_mask': the actions Box.* no choices of one of n",
    ),
    "stacked out of shape": (
        {"environment": {"id": "Grid-v7"}, "policy": {"frame_stack": 4}},
        r"environment\.id='Grid-v7': policy\.frame_stack=4: .*stack fewer frames",
    ),
}


class Grid(gymnasium.Env[Any, Any]):
    """Ten by ten fields of four channels."""

    observation_space = gymnasium.spaces.Box(0, 255, (10, 10, 4), np.uint8)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Nothing moves."""
        super().reset(seed=seed)
        return np.zeros((10, 10, 4), np.uint8), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """One step, and it is over."""
        return np.zeros((10, 10, 4), np.uint8), 0.0, True, False, {}


@pytest.mark.parametrize(("layer", "message"), STATE.values(), ids=STATE)
def test_state_and_masks_that_cannot_be_are_refused(layer: dict[str, Any], message: str) -> None:
    if "Grid-v7" not in gymnasium.registry:
        gymnasium.register("Grid-v7", lambda **_: Grid())
    with pytest.raises(ConfigurationError, match=message):
        make_model(configuration.load([{"run": "a"}, layer]))


def test_a_fragment_carries_what_the_policy_remembers_and_the_masks() -> None:
    task = {"id": "Menu-v0", "mask_key": "action_mask"}
    policy = {"recurrent": "gru", "recurrent_size": 8, "shared_trunk": True, "frame_stack": 2}
    rules = make_model(
        configuration.load([{"run": "a", "environment": task, "policy": policy}])
    ).specification
    assert {rule.name: (rule.shape, rule.axes) for rule in rules.schema.under("state")} == {
        "state/actor/h": ((8,), Axes.SLOT),
        "state/frames/held": ((), Axes.SLOT),
        "state/frames/observation": ((1,), Axes.SLOT),
    }
    assert rules.schema.by_name["mask/action"].shape == (6,)
    assert "begins" in rules.schema.by_name
    plain = make_model(configuration.load([{"run": "a"}])).specification.schema
    assert plain == fragment_schema(*spaces(EnvironmentSection()))


ON_HARDWARE: dict[str, tuple[int, dict[str, Any], str]] = {
    "replay": (2, {"algorithm": {"name": "dqn"}}, r"algorithm.name='dqn': .*there are 2; use impala or"),
    "clone": (2, {"algorithm": {"name": "clone"}}, r"algorithm.name='clone': .*learner.ranks=1"),
    "recurrent": (2, {"policy": {"recurrent": "gru"}}, r"policy.recurrent='gru': .*learner.ranks=1"),
    "record": (2, {"learner": {"record": "r"}}, r"learner.record='r': .*learner.ranks=1"),
    "recording": (2, {"learner": {"feed_from": "r"}}, r"learner.feed_from='r': .*learner.ranks=1"),
    "bfloat16-sac": (
        1,
        {"algorithm": {"name": "sac"}, "learner": {"precision": "bfloat16"}},
        r"learner.precision='bfloat16': algorithm.name='sac'.*leave it at its default",
    ),
    "compiled-core": (
        1,
        {"policy": {"recurrent": "lstm"}, "learner": {"compile": True}},
        r"learner.compile=true: .*policy.recurrent='lstm'",
    ),
    "compiled-dropout": (
        1,
        {"policy": {"dropout": 0.1}, "learner": {"compile": True}},
        r"learner.compile=true: .*policy.dropout=0.1",
    ),
}


@pytest.mark.parametrize(("ranks", "layer", "message"), ON_HARDWARE.values(), ids=ON_HARDWARE)
def test_what_a_learners_hardware_cannot_is_refused(ranks: int, layer: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        check_hardware(configuration.load([{"run": "a"}, layer]), ranks)


def test_what_several_ranks_share_is_not_refused() -> None:
    for name in ("ppo", "impala", "reinforce"):
        policy = {"hidden_norm": "batch", "dropout": 0.1, "frame_stack": 2}
        check_hardware(configuration.load([{"run": "a", "algorithm": {"name": name}, "policy": policy}]), 2)


class OnPolicyClone(OnPolicySection):
    """Says, as its base does, that its algorithm computes on any hardware."""

    name: Literal["clone"] = "clone"


@pytest.mark.parametrize(
    ("ranks", "layer"), [(2, {}), (1, {"compile": True}), (1, {"precision": "bfloat16"})]
)
def test_an_algorithm_that_takes_no_hardware_is_refused_it_whatever_its_section_says(
    ranks: int, layer: dict[str, Any]
) -> None:
    settings = configuration.load([{"run": "a"}, {"learner": layer}])
    with pytest.raises(ConfigurationError, match="algorithm.name='clone'"):
        check_hardware(settings.model_copy(update={"algorithm": OnPolicyClone()}), ranks)


def test_tokens_are_learned_in_mixed_precision_by_one_rank() -> None:
    tokens: dict[str, Any] = {"run": "a", "algorithm": {"name": "token_ppo"}}
    check_hardware(configuration.load([tokens, {"learner": {"precision": "bfloat16"}}]), 1)
    for ranks, layer in ((1, {"learner": {"compile": True}}), (2, {})):
        with pytest.raises(ConfigurationError, match="algorithm.name='token_ppo'"):
            check_hardware(configuration.load([tokens, layer]), ranks)
