"""People like the version of a round better, and it is promoted by proof, though the gateway was killed."""

import secrets
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest

from penstock.registry.records import Status
from penstock.registry.registry import Registry
from penstock.workloads.chat.loop_state import (
    LoopState,
    Outcome,
    Step,
    folder_of,
    read_state,
    round_folder,
)
from penstock.workloads.chat.people import draw_prompt
from penstock.workloads.chat.step_process import has_checkpoint
from tests.support.chat.chat_gateway import ChatGateway
from tests.support.chat.opinions import talks
from tests.support.run.harness import eventually

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

LABELS = 24
MOST_PEOPLE = 400
"""Fewer than a hundred suffice where all like the one version and nobody the other."""
FALLBACK = 0
"""Answers where a version is slow, as on a busy machine."""
OPTIONS = (
    "--learn",
    f"--loop=labels={LABELS}",
    "--loop=least-auc=0",
    "--loop=any-version",
    "--loop=reward=epochs=1",
    "--loop=train=learner.total_steps=5000",
    "--loop=train=learner.checkpoint_interval_s=0",
    "--loop=train=evaluation.episodes=2",
    "--train=canary.settle_s=0.5",
)
TRAINING = "epochs = 6, batch = 16, learning_rate = 1e-2, hidden = 32, layers = 1, pieces = 320"


def people(
    gateway: ChatGateway, rng: np.random.Generator, heard: list[int], liked: int | None = None
) -> Iterator[int]:
    """One after the other asks, gives a thumb up where the version is the one that is liked, and goes.

    heard: gets the version of each thumb that was acknowledged.
    """
    while True:
        gateway.me = secrets.token_hex(16)
        with gateway.begin() as talk:
            _, kind, data = talk.say(draw_prompt(rng))
            assert kind == "answer", data
            talk.tell("thumb", data["turn"], up=data["version"] == liked)
        heard.append(data["version"])
        yield data["version"]


def test_a_better_version_is_promoted_although_the_gateway_was_killed(tmp_path: Path) -> None:
    rng, heard = np.random.default_rng(3), list[int]()
    state = tmp_path / "state" / "run"
    first = ChatGateway(tmp_path, *OPTIONS, talks=talks(1, 240), training=TRAINING)
    with first:
        list(islice(people(first, rng, heard), LABELS))
        training = round_folder(folder_of(state), 1) / "run"
        eventually(lambda: has_checkpoint(training), "the training of the round", 600)
        first.kill()
    with ChatGateway(tmp_path, *OPTIONS, talks=talks(1, 240), training=TRAINING) as gateway:
        eventually(lambda: stands(state).step is Step.TRIAL, "the trial", 600)
        made = stands(state).version
        assert made is not None
        for _ in islice(people(gateway, rng, heard, made), MOST_PEOPLE):
            if stands(state).past:
                break
        (past,) = stands(state).past
        assert (past.outcome, past.version) == (Outcome.PROMOTED, made)
        assert past.why.startswith("better for higher_return after ")
        assert set(heard) - {FALLBACK} == {1, made}
        heard_of = lambda: next(people(gateway, rng, heard, made)) == made  # noqa: E731 - one use
        eventually(heard_of, "a server that has heard of it", 60)
        told = gateway.get("/api/chat/overview")
        assert (told["active"], told["canary"], told["canaries"]["tried"]) == (made, None, 1)
        by = [(one["action"], one["by"]) for one in told["decisions"] if one["version"] == made]
        assert by[0] == ("promoted", "loop")
        nothing_is_begun_twice(state, made, len(heard))
    assert gateway.summary()["ledger"]["balanced"]


def stands(run: Path) -> LoopState:
    """Where the loop is."""
    return read_state(folder_of(run))


def nothing_is_begun_twice(run: Path, made: int, given: int) -> None:
    """One training of each kind, one version of it on trial, and each thumb that was acknowledged."""
    words = (round_folder(folder_of(run), 1) / "steps.log").read_text().splitlines()
    begun = [line for line in words if line.startswith("$ ")]
    assert sum("penstock rlhf reward train" in line for line in begun) == 1
    assert sum("penstock train round.toml" in line for line in begun) == 1
    assert any("penstock train run --resume" in line for line in begun)
    with Registry.read(f"sqlite:///{run}/registry.sqlite") as registry:
        own = [one for one in registry.list("default") if "-round-" in one.run]
        assert len({one.run for one in own}) == 1
        tried = [(one.version, one.status) for one in own if one.status is not Status.CANDIDATE]
        assert tried == [(made, Status.ACTIVE)]
        kept = [one for one in registry.ratings("default", 0, 1000) if one.rating.key == "thumb"]
    assert len(kept) == given
    assert len({one.rating.conversation for one in kept}) == len(kept)
