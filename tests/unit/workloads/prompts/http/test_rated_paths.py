"""What people say over HTTP is kept in the run's registry, and learned from where it is the reward."""

from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from penstock.registry.ratings import Rating
from penstock.registry.registry import Registry
from penstock.workloads.prompts.http.prompts_api import MOST_WORK_WAITING
from tests.support.prompts.small_prompts import SmallPrompts, embedding, small_prompts
from tests.support.serving.server_parts import column

PROMPT = "Write a function that sorts a list"


def longer(prompts: list[Any], responses: list[str]) -> list[float]:
    """A source of rewards, which likes long texts."""
    del prompts
    return [len(one) / 100 for one in responses]


def kept(url: str) -> list[Rating]:
    """All ratings, oldest first."""
    with Registry.read(url) as registry:
        return [one.rating for one in registry.ratings("default")]


def test_a_rating_is_kept_once(short_folder: Path) -> None:
    url = f"sqlite:///{short_folder}/registry.sqlite"
    with small_prompts(short_folder, registry=url) as prompts:
        best = prompts.post("/optimize", prompt=PROMPT).json()
        assert prompts.post("/rate", id=best["id"], score=0.75).json() == {"stored": True, "learned": 0}
        again = prompts.post("/rate", id=best["id"], score=0.5)
        assert (again.status_code, again.json()["field"]) == (404, "id")
        (rating,) = kept(url)
        assert (rating.prompt, rating.response) == (PROMPT, best["prompt"])
        assert (rating.score, rating.version) == (0.75, 1)
        assert prompts.fragments() == []


@pytest.mark.parametrize("score", [-0.1, 1.1, "1", True, float("nan"), None])
def test_what_is_no_rating_is_refused(prompts: SmallPrompts, score: Any) -> None:
    reply = prompts.client.post(
        "/rate",
        content=f'{{"id": "x", "score": {_json(score)}}}',
        headers={"Content-Type": "application/json"},
    )
    assert (reply.status_code, reply.json()["field"]) == (422, "score")


def _json(value: Any) -> str:
    return {True: "true", None: "null", "1": '"1"'}.get(value, str(value).replace("nan", "NaN"))


def test_where_no_registry_is_known_a_path_can_be_rated_later(prompts: SmallPrompts) -> None:
    best = prompts.post("/optimize", prompt=PROMPT).json()
    for _ in range(2):
        reply = prompts.post("/rate", id=best["id"], score=1.0)
        assert (reply.status_code, "--run" in reply.json()["detail"]) == (409, True)


def test_ratings_are_the_reward(short_folder: Path) -> None:
    url = f"sqlite:///{short_folder}/registry.sqlite"
    with small_prompts(short_folder, task={"reward": "ratings"}, registry=url) as prompts:
        assert prompts.client.get("/checks").json()["rewarded_by"] == "ratings"
        assert prompts.post("/mutate", prompt=PROMPT, action=1).json()["reward"] is None
        refused = prompts.post("/optimize", prompt=PROMPT)
        assert (refused.status_code, refused.json()["field"]) == (409, "explore")
        drawn = prompts.post("/optimize", prompt=PROMPT, steps=3, explore=True).json()
        assert (len(drawn["path"]), drawn["reward"]) == (3, None)
        assert prompts.post("/rate", id=drawn["id"], score=0.25).json()["learned"] == 3
        (fragment,) = prompts.fragments()
        assert column(fragment, "reward") == [0.0, 0.0, -0.5]
        assert column(fragment, "action") == [one["action"] for one in drawn["path"]]
        assert column(fragment, "terminated") == [False, False, True]
        assert column(fragment, "valid") == [True] * 3
        assert [one.score for one in kept(url)] == [0.25]


def test_ratings_without_updates_are_bounded(short_folder: Path) -> None:
    url = f"sqlite:///{short_folder}/registry.sqlite"
    with small_prompts(short_folder, task={"reward": "ratings"}, registry=url) as prompts:
        prompts.api.most_waiting = 3
        paths = [prompts.post("/optimize", prompt=PROMPT, steps=3, explore=True).json() for _ in range(2)]
        assert prompts.post("/rate", id=paths[0]["id"], score=1.0).status_code == 200
        full = prompts.post("/rate", id=paths[1]["id"], score=1.0)
        assert (full.status_code, full.headers["retry-after"]) == (429, "1")
        prompts.api.learning.waiting_steps = 0
        assert prompts.post("/rate", id=paths[1]["id"], score=1.0).json()["learned"] == 3


def test_a_person_checks_one_of_so_many_rewards(short_folder: Path) -> None:
    url = f"sqlite:///{short_folder}/registry.sqlite"
    task = {"reward_source": f"{__name__}:longer", "human_check_every": 2}
    with small_prompts(short_folder, task=task, registry=url) as prompts:
        for action in (0, 2, 3, 4):
            assert prompts.post("/mutate", prompt=PROMPT, action=action).json()["reward"] > 0
        state = prompts.client.get("/checks").json()
        assert (state["rewarded_by"], state["every"], len(state["waiting"])) == ("source", 2, 2)
        one = state["waiting"][0]
        said = prompts.post("/checks", id=one["id"], better="before").json()
        assert (said["checked"], said["agreed"]) == (1, 0)
        assert prompts.post("/checks", id=one["id"], better="before").status_code == 404
        (rating,) = kept(url)
        assert (rating.response, rating.rejected) == (one["before"], one["after"])
        assert prompts.post("/mutate", prompt=PROMPT, action=0, rewarded=False).json()["reward"] is None


def test_what_cannot_be_embedded_or_rewarded_is_told(short_folder: Path) -> None:
    task = {"reward_source": f"{__name__}:nothing", "embedding": "hashing"}
    with small_prompts(short_folder, task=task) as prompts:
        reply = prompts.post("/mutate", prompt=PROMPT, action=3)
        assert (reply.status_code, "gave no score" in reply.json()["detail"]) == (502, True)
        assert prompts.post("/embed", prompt=PROMPT).status_code == 200


def test_a_source_that_is_slow_holds_up_nothing_else(short_folder: Path) -> None:
    held.clear()
    task = {"reward_source": f"{__name__}:slow"}
    many = MOST_WORK_WAITING + 1
    with small_prompts(short_folder, task=task) as prompts, ThreadPoolExecutor(many) as programs:
        asked = [programs.submit(prompts.post, "/mutate", prompt=PROMPT, action=3) for _ in range(many)]
        refused = next(as_completed(asked)).result()
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert prompts.select(embedding(0))["version"] == 1
        held.set()
        assert sorted(one.result().status_code for one in asked) == [200] * MOST_WORK_WAITING + [503]


held = Event()


def slow(prompts: list[Any], responses: list[str]) -> list[float]:
    """A source that answers when a test lets it."""
    del prompts
    assert held.wait(60)
    return [0.0] * len(responses)


def nothing(prompts: list[Any], responses: list[str]) -> list[None]:
    """A source that gives no score."""
    del prompts
    return [None] * len(responses)
