"""`policy.network`: a right one works like every policy, a wrong one is refused where it is written."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.config.settings import ConfigurationError, PolicySection
from penstock.learner.probe import Quarantine, make_probe
from penstock.policy import weights
from penstock.policy.policy import Policy, build
from penstock.protocol.spaces import Dict, Discrete, Space, Tuple
from tests.support.experience.experience import box
from tests.unit.penstock.policy.test_policy import MIXED, image, observations

OWN = "tests.unit.penstock.policy.own_networks"
EXAMPLE = "residual_network:ResidualNetwork"
PARTS = Dict((("where", box(3)), ("kind", Discrete(4)), ("pair", Tuple((box(2), Discrete(2))))))


def make(name: str, space: Space = PARTS, seed: int = 0, **section: Any) -> Policy:
    """A policy with that network."""
    return build(space, Discrete(2), PolicySection(network=name, **section), seed)


@pytest.fixture
def examples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of examples can be imported from."""
    monkeypatch.syspath_prepend(Path(__file__).resolve().parents[4] / "examples" / "python")


@pytest.mark.parametrize("shared", [False, True])
def test_actor_and_critic_have_one_each_unless_they_share(shared: bool) -> None:
    policy = make(f"{OWN}:Good", network_arguments={"scale": 2.0}, shared_trunk=shared)
    assert (policy.critic_body is None) == shared
    assert policy.actor_body.get_submodule("network").scale == 2.0
    seen = observations(PARTS, 7)
    acted = policy.act(seen)
    np.testing.assert_allclose(policy.log_prob(seen, acted.action), acted.log_prob, atol=2e-5)


def test_equal_seeds_give_equal_weights_and_leave_global_state_alone() -> None:
    torch.manual_seed(3)
    undisturbed = torch.rand(1)
    torch.manual_seed(3)
    assert weights.encode(make(f"{OWN}:Good", seed=4)) == weights.encode(make(f"{OWN}:Good", seed=4))
    assert torch.rand(1) == undisturbed
    assert weights.encode(make(f"{OWN}:Good", seed=4)) != weights.encode(make(f"{OWN}:Good", seed=5))


def test_it_is_published_and_probed_like_every_policy() -> None:
    learner, replica, actor = (make(f"{OWN}:Good", seed=seed) for seed in (1, 2, 3))
    probe = make_probe(PARTS, replica, 0)
    quarantine = Quarantine(probe, replica, 1e-3)
    blob = weights.encode(learner)
    quarantine.expect(1, weights.sha256(blob), weights.snapshot(learner))
    weights.load_into(actor, blob)
    answer = actor.acting_log_prob(probe.observation, probe.action)
    np.testing.assert_allclose(answer, learner.log_prob(probe.observation, probe.action), atol=1e-5)


def test_the_reader_says_where_each_part_lies() -> None:
    policy = make("", MIXED)
    seen = {path: torch.from_numpy(array) for path, array in observations(MIXED, 5).items()}
    vector = policy.read(seen).vector
    columns = policy.reader.columns
    assert columns.keys() == {"observation/arm", "observation/code", "observation/bits"}
    torch.testing.assert_close(vector[:, columns["observation/arm"]], seen["observation/arm"])
    torch.testing.assert_close(vector[:, columns["observation/bits"]], seen["observation/bits"].float())
    assert vector[:, columns["observation/code"]].sum(1).eq(1).all()


def test_the_example_reads_vectors_and_images(examples: None) -> None:
    for space in (box(4), Dict((("camera", image(10, 10)), ("arm", box(2))))):
        policy = make(EXAMPLE, space, network_arguments={"blocks": 1, "dropout": 0.1})
        seen = observations(space, 6)
        acted = policy.act(seen)
        np.testing.assert_allclose(policy.log_prob(seen, acted.action), acted.log_prob, atol=2e-5)
        assert len(policy.dropouts) == 2


BROKEN = {
    "TooNarrow": r"forward gives torch.float32\(5, 11\) for 5 rows, must be torch.float32\(5, 12\)",
    "OneRow": r"forward gives torch.float32\(12,\) for 5 rows",
    "Double": r"forward gives torch.float64\(5, 12\)",
    "DoubleWeights": r"parameters \['extra torch.float64'\], must be torch.float32",
    "NotFinite": "hold NaN or infinity",
    "Raises": "forward raised RuntimeError: .*for 5 rows",
    "RaisesAtOnce": r"made with policy.network_arguments=\{\} it raised RuntimeError: no such file",
    "Numbers": "forward gives a list, must be a Tensor",
    "Writes": "writes to its inputs",
    "Remembers": "a second call gives other features",
    "LooksAround": "depend on the rows beside it",
    "TorchDropout": "training mode gives other features; use Dropout and BatchNorm of penstock.policy",
    "TorchBatchNorm": "training mode gives other features",
    "Frozen": r"parameters \['layer.weight'\] take no gradient; make them buffers",
    "NoWidth": "width=None; say how many features it gives",
    "NoModule": "NoModule.*, must be a class of torch.nn.Module",
    "Huge": "its weights cannot be published: .*header",
    "NOTHING": "None, must be a class of torch.nn.Module",
    "make": "function make .*, must be a class",
    "Absent": "cannot be loaded: AttributeError",
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_contract_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigurationError, match=rf"policy.network='{OWN}:{name}': .*{BROKEN[name]}"):
        make(f"{OWN}:{name}")


@pytest.mark.parametrize(
    ("name", "words"),
    [("Good", "write module:Class"), ("no_such_module:Good", "ModuleNotFoundError.*PYTHONPATH")],
)
def test_a_name_that_cannot_be_loaded_is_refused(name: str, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        make(name)


def test_arguments_that_it_does_not_take_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"network_arguments=\{'colour': 1\} it raised TypeError"):
        make(f"{OWN}:Good", network_arguments={"colour": 1})
