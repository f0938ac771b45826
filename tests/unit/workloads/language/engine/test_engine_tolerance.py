"""How far an engine is from a plain pass is measured once, and one that is too far is refused."""

from pathlib import Path

import numpy as np
import pytest

from penstock.config.settings import ServingSection
from penstock.protocol.specification import Probe
from penstock.runtime import metrics
from penstock.runtime.exit import RunFailed
from penstock.workloads.language.engine import ContinuousEngine, EngineTolerance, LoadedPolicies
from penstock.workloads.language.serving.text_answerer import AdapterVersions
from penstock.workloads.plugin.serving import Weights
from tests.support.language.text_stand import EOS, PAD, adapter, make_model, policy_of, specification

PROBE = specification().probe


class Rounding(ContinuousEngine):
    """Another engine: its answers are those of the plain pass, rounded to so many digits."""

    digits = 2

    def probe_answer(self, version: int, probe: Probe) -> tuple[float, ...]:
        """As it rounds."""
        given = np.asarray(super().probe_answer(version, probe))
        scale = 10.0 ** (self.digits - 1 - np.floor(np.log10(np.abs(given))))
        return tuple((np.round(given * scale) / scale).tolist())


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder."""
    return make_model(tmp_path_factory.mktemp("engine") / "model")


def versions_of(engine: type[ContinuousEngine], base: Path, most: float) -> tuple[AdapterVersions, list[int]]:
    """The versions behind an engine, and how often a policy was made to measure it with."""
    policy, made = policy_of(base), list[int]()

    def another() -> object:
        made.append(1)
        return policy_of(base)

    tolerance = EngineTolerance("theirs", another, most)  # type: ignore[arg-type]
    running = engine(LoadedPolicies(policy), eos_id=EOS, pad_id=PAD)
    return AdapterVersions(running, policy, {}.get, ServingSection(), tolerance), made


async def test_an_engine_is_measured_once_with_the_first_weights(base: Path) -> None:
    versions, made = versions_of(Rounding, base, 0.1)
    for version in (1, 2):
        weights = Weights(version, version - 1, adapter(base, version, size=0.1))
        await versions.take_probed(weights, PROBE)
    assert len(made) == 1
    assert 1e-4 < metrics.ENGINE_PROBE_DIFFERENCE._value.get() < 0.1


async def test_an_engine_of_the_plain_pass_is_within_the_tolerance(base: Path) -> None:
    versions, _ = versions_of(ContinuousEngine, base, 1e-5)
    await versions.take_probed(Weights(1, 0, adapter(base, 1, size=0.2)), PROBE)
    assert metrics.ENGINE_PROBE_DIFFERENCE._value.get() < 1e-5


@pytest.mark.promise("server-answers-engine-run")
async def test_an_engine_that_would_be_quarantined_does_not_begin(base: Path) -> None:
    versions, _ = versions_of(Rounding, base, 1e-5)
    message = r"engine='theirs': .* learner.probe_tolerance=1e-05: .* Set the tolerance to 0\.0\d"
    with pytest.raises(RunFailed, match=message):
        await versions.take_probed(Weights(1, 0, adapter(base, 1)), PROBE)
    assert versions.served() == {}
