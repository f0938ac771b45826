"""Several threads read models at once."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from workloads.rlhf.policy.network import make_network
from workloads.rlhf.policy.settings import LanguageSection


def test_models_that_are_read_at_once_leave_torch_as_it_was(base: Path) -> None:
    """A learner and an actor in one process: the second left torch on `meta`, and no model read later had weights."""
    section = LanguageSection(model=str(base))
    with ThreadPoolExecutor(3) as threads:
        made = list(threads.map(lambda _: make_network(section, 0), range(24)))
    for network in (*made, make_network(section, 0)):
        assert {parameter.device.type for parameter in network.parameters()} == {"cpu"}
