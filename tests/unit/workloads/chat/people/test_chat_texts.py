"""What a response says can be read from it, whatever was written into it."""

import numpy as np
import pytest

from penstock.workloads.chat.people import (
    LONG,
    REFERENCE,
    TOPICS,
    WORDS,
    Profile,
    draw_profile,
    draw_prompt,
    draw_response,
    read_profile,
    topic_of,
    write_response,
)
from tests.support.chat.opinions import FEATURES, PROFILES, profile_chances


@pytest.mark.parametrize("profile", PROFILES, ids=lambda one: "".join("01"[bit] for bit in one))
def test_what_is_written_is_read(profile: Profile) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        prompt = draw_prompt(rng)
        response = write_response(rng, prompt, profile)
        assert read_profile(prompt, response) == profile
        assert 1 <= len(response.split()) <= LONG[1]
        assert set(response.split()) | set(prompt.split()) <= set(WORDS)


def test_profiles_come_as_often_as_their_chances_say() -> None:
    rng = np.random.default_rng(1)
    drawn = np.array([draw_profile(rng) for _ in range(20_000)], np.float64)
    assert profile_chances(REFERENCE).sum() == pytest.approx(1)
    assert drawn.mean(0) == pytest.approx(profile_chances(REFERENCE) @ FEATURES, abs=0.02)


def test_the_topic_decides_what_is_on_topic() -> None:
    assert topic_of("how soil rose") == "garden"
    assert topic_of("hello") == ""
    assert read_profile("how soil rose", "seed").on_topic
    assert not read_profile("why train map", "seed").on_topic
    assert not read_profile("why train map", "seed ticket").on_topic
    assert not read_profile("why train map", "").brief


def test_responses_of_the_reference_are_about_every_topic() -> None:
    rng = np.random.default_rng(2)
    prompts = [draw_prompt(rng) for _ in range(100)]
    assert {topic_of(one) for one in prompts} == set(TOPICS)
    assert len({draw_response(rng, prompts[0]) for _ in range(50)}) > 30
