"""A run's folder with versions of a model that knows a dialogue by heart, for `penstock serve`."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from penstock.config.settings import EnvironmentSection, PolicySection
from penstock.protocol.specification import RunSpecification
from tests.support.language import text_stand
from tests.support.language.text_stand import adapter, make_model
from tests.support.run.broker_process import BrokerProcess
from tests.support.run.serving_run import RUN, ServedRun, serving

GOOD: Final = 1e-3
"""Noise of an adapter that leaves the model as it is."""
BAD: Final = 0.5
"""Of one under which it knows the dialogue no more."""


@dataclass(frozen=True)
class ServedTextRun(ServedRun):
    """See `ServedRun`; its versions are adapters of the model in `base`."""

    base: Path = Path()

    def specification(self) -> RunSpecification:
        """Of `text_stand`, with this folder's model."""
        environment = EnvironmentSection(id="text", kwargs={"model": str(self.base), "response_tokens": 6})
        policy = PolicySection(kwargs={"model": str(self.base), "rank": 4})
        return replace(
            text_stand.specification(),
            run=RUN,
            environment_json=environment.canonical_json(),
            policy_json=policy.canonical_json(),
        )

    def add(self, version: int, size: float) -> int:
        """A version whose adapter is noise of this size; its number."""
        self.keep(version, adapter(self.base, version, size=size))
        return version


def begun(folder: Path) -> ServedTextRun:
    """A run with version 1, active."""
    made = ServedTextRun(folder / "run", base=make_model(folder / "model"))
    made.describe()
    made.promote(made.add(1, GOOD))
    return made


@contextmanager
def serving_text(run: ServedTextRun, **settings: Any) -> Iterator[BrokerProcess]:
    """`penstock serve` over it, ready."""
    places = {"actor.places.model": str(run.base)}
    with serving(run.folder.parent, run.folder, **places, **settings) as server:
        yield server
