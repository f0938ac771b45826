"""A version that people dislike is withdrawn by what they say, with nobody looking after it."""

import itertools
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
import pytest

from penstock.client import Arm, TextClient
from penstock.config.settings import CanarySection, EnvironmentSection, PolicySection
from penstock.policy import weights
from penstock.protocol.schema import fragment_schema
from penstock.protocol.spaces import Discrete
from penstock.protocol.specification import RunSpecification
from penstock.registry.records import Status
from penstock.workloads.chat.people import draw_prompt, population
from penstock.workloads.language.language_model import make_probe
from penstock.workloads.language.tokenizer import load_tokenizer
from tests.learning.small_words import learned, settings_of
from tests.support.chat.liked_answers import LIKED
from tests.support.chat.opinions import make_people_base
from tests.support.language.text_stand import ServedTextRun, serving_text
from tests.support.run.harness import eventually

HORIZON: Final = CanarySection().horizon
"""Clients of a canary, within which it has a verdict."""
UPDATES: Final = 24
SHORT: Final = {"learning_rate": 2e-3, "critic_learning_rate": 2e-3, "kl_coefficient": 0.1}


@dataclass(frozen=True)
class LikedRun(ServedTextRun):
    """A run whose versions are adapters as `small_words` trains them."""

    def specification(self) -> RunSpecification:
        """With the vocabulary of the people's words."""
        tokens = Discrete(len(load_tokenizer(str(self.base))))
        kwargs = {"model": str(self.base), "rank": 8, "alpha": 16.0}
        environment = EnvironmentSection(id="text", kwargs={"model": str(self.base), "response_tokens": 12})
        return replace(
            super().specification(),
            environment_json=environment.canonical_json(),
            policy_json=PolicySection(kwargs=kwargs).canonical_json(),
            observation_space=tokens,
            action_space=tokens,
            schema=fragment_schema(tokens, tokens),
            probe=make_probe(tokens.n, 0),
        )


def flipped(blob: bytes) -> bytes:
    """The adapter that adds the opposite to every layer."""
    arrays = weights.decode(blob)
    return weights.encode(
        {name: np.negative(one) if "lora_B" in name else one for name, one in arrays.items()}
    )


def withdrawn(folder: Path, seed: int) -> None:
    """Train an adapter, make it active and its opposite a canary, and let people talk."""
    base = make_people_base(folder / "base")
    rng = np.random.default_rng(seed)
    asked = [draw_prompt(rng) for _ in range(256)]
    _, liked = learned(settings_of(base, folder, seed, asked, LIKED, **SHORT), UPDATES)
    run = LikedRun(folder / "run", base=base)
    run.describe()
    run.keep(1, liked)
    run.promote(1)
    run.keep(2, flipped(liked))
    with (
        serving_text(run, **{"canary.settle_s": 0.05, "canary.slow_ms": 1e6}) as server,
        TextClient(server.address) as client,
    ):
        run.promote(2, canary_share=0.5)
        eventually(lambda: {1, 2} <= {one.version for one in client.describe().versions}, "the canary", 60)
        thumbs: dict[int, list[float]] = {1: [], 2: []}
        people = population(60, seed=seed)
        for number in itertools.count():
            assert len(thumbs[2]) < HORIZON, {key: np.mean(some) for key, some in thumbs.items()}
            talk, prompt = client.start_conversation(f"person-{number}"), draw_prompt(rng)
            given = talk.generate([{"role": "user", "content": prompt}])
            text = str(given.answers[0].message["content"])
            up = float(people.thumb(rng, people.somebody(rng), prompt, text))
            thumbs[given.version].append(up)
            talk.end(reward=up)
            if number % 10 == 9 and run.status(2) is Status.ROLLED_BACK:
                break
        print(f"seed {seed}: {[(len(some), np.mean(some)) for some in thumbs.values()]}")
        assert run.status(1) is Status.ACTIVE
        eventually(
            lambda: {client.start_conversation(f"back-{n}").arm for n in range(20)} == {Arm.ACTIVE},
            "everybody back",
            60,
        )


def test_a_flipped_adapter_is_withdrawn_by_itself(tmp_path: Path) -> None:
    withdrawn(tmp_path, 0)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_it_is_withdrawn_from_every_seed(tmp_path: Path, seed: int) -> None:
    withdrawn(tmp_path, seed)
