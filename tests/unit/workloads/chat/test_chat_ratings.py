import json
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.config.configuration_error import ConfigurationError
from penstock.workloads.chat.commands import loop_commands
from penstock.workloads.chat.loop_state import (
    MEMBERS,
    MOST_CHANGES,
    LoopOrder,
    LoopState,
    NewRatings,
    believed,
    disagreement,
    folder_of,
    member_heads,
    member_weights,
    new_among,
    read_head_weights,
    read_pause,
    replayed_prompts,
    standing_weights,
    weigh,
    with_members,
    without_members,
    write_state,
)
from penstock.workloads.chat.people import (
    LONG,
    REFERENCE,
    THUMB,
    TOPICS,
    USUAL,
    WORDS,
    Person,
    Population,
    Profile,
    draw_profile,
    draw_prompt,
    draw_response,
    population,
    read_profile,
    topic_of,
    write_response,
)
from penstock.workloads.chat.ratings import DAY_S, RatingRules, Reason, filter_ratings
from penstock.workloads.chat.step_process import JUDGE, ServedJudge, judge_address, keep_judge
from penstock.workloads.language.feedback import write_rows
from tests.support.chat import opinions
from tests.support.chat.chat_stand import POLICY, loop_stand

RULES = RatingRules()
CHANCES = dict(zip(opinions.PROFILES, USUAL.thumb_chance(opinions.FEATURES), strict=True))


def row(rater: str = "ann", **fields: Any) -> dict[str, Any]:
    return {"prompt": "a", "response": "b", "key": THUMB, "score": True, "rater": rater, **fields}


def thumbs(people: Population, seed: int, each: int, responses: int) -> list[dict[str, Any]]:
    """Of every person for so many of the responses, in the order of a day."""
    rng = np.random.default_rng(seed)
    prompts = [draw_prompt(rng) for _ in range(responses)]
    known = [(prompt, draw_response(rng, prompt)) for prompt in prompts]
    rows = []
    for person in people.people:
        for number in rng.choice(responses, each, replace=False):
            prompt, response = known[number]
            up = people.thumb(rng, person, prompt, response)
            rows.append(row(person.name, prompt=prompt, response=response, score=up))
    return [rows[number] for number in rng.permutation(len(rows))]


def expected(one: Any) -> float:
    return float(CHANCES[read_profile(one["prompt"], one["response"])])


def test_a_flood_counts_as_one_vote() -> None:
    others = [row(f"person-{number}", at_s=float(number)) for number in range(20)]
    found = filter_ratings([*others, *opinions.flood("a", "b")], RULES)
    assert found.dropped == {Reason.REPEATED: 499}
    assert found.raters == {opinions.FLOODER: Counter({Reason.REPEATED: 499})}
    assert sum(one["score"] for one in found.kept) == 20
    assert len(found.kept) == 21


def test_the_newest_rating_of_an_answer_counts() -> None:
    found = filter_ratings(
        [
            row(at_s=9.0, score=False),
            row(at_s=5.0),
            row(key="relevance", score=3),
            row("bob"),
            row(response=None, chosen="x", rejected="y"),
            row(response=None, chosen="y", rejected="x"),
        ],
        RULES,
    )
    assert found.dropped == {Reason.REPEATED: 2}
    assert found.kept[0]["score"] is False
    assert found.kept[-1]["chosen"] == "y"
    assert len(found.kept) == 4


def test_ratings_of_a_registry_are_ordered_by_number() -> None:
    earlier, later = row(at_s=9.0, number=1), row(at_s=5.0, number=2, score=False)
    for rows in ([earlier, later], [later, earlier], [{**later, "at_s": 9.0}, earlier]):
        assert [one["number"] for one in filter_ratings(rows, RULES).kept] == [2]
    (kept,) = filter_ratings([earlier, {**later, "number": 1}], RULES).kept
    assert kept["at_s"] == 9.0
    (kept,) = filter_ratings([earlier, row(at_s=5.0)], RULES).kept
    assert kept["at_s"] == 9.0


def test_a_clock_that_was_ahead_takes_no_ratings_of_the_days_after() -> None:
    rules = RatingRules(daily_cap=2)
    ahead = [row(response=f"ahead-{number}", at_s=9 * DAY_S, number=number) for number in range(3)]
    after = [row(response=f"after-{number}", at_s=DAY_S, number=3 + number) for number in range(3)]
    found = filter_ratings([*ahead, *after], rules)
    assert [one["number"] for one in found.kept] == [0, 1, 3, 4]


def test_ratings_per_person_and_day_are_limited() -> None:
    rules = RatingRules(daily_cap=3)
    rows = [row(response=str(number), at_s=float(number)) for number in range(5)]
    late = row(response="late", at_s=DAY_S + 1.5)
    found = filter_ratings([*rows, late], rules)
    assert [one["response"] for one in found.kept] == ["0", "1", "2", "late"]
    assert found.dropped == {Reason.OVER_CAP: 2}


def test_deleted_raters_are_left_out_and_unnamed_ones_counted() -> None:
    found = filter_ratings([row(), row("bob"), row(""), row("")], RULES, deleted={"bob"})
    assert found.dropped == {Reason.DELETED: 1}
    assert found.unnamed == 2
    assert [one["rater"] for one in found.kept] == ["ann", "", ""]


@pytest.mark.parametrize("by", ["others", "chance"])
def test_liars_are_found_by_the_ratings_of_others(by: str) -> None:
    lying, caught, accused = 0, 0, 0
    for seed in range(5):
        people = population(60, seed=seed)
        liars = {one.name for one in people.people if one.is_liar}
        rows = thumbs(people, seed, each=80, responses=100)
        found = filter_ratings(rows, RULES, expected=expected if by == "chance" else None)
        lying += len(liars)
        caught += len(liars & found.evidence.keys())
        accused += len(found.evidence.keys() - liars)
        assert not {one["rater"] for one in found.kept} & found.evidence.keys()
        assert found.dropped[Reason.LIAR] == 80 * len(found.evidence)
    assert lying == 15
    assert caught >= 10, (caught, accused)
    assert accused <= 2, (caught, accused)


def test_a_few_thumbs_judge_no_rater() -> None:
    rows = [row("ann", response=str(number), score=False) for number in range(9)]
    agreed = [row(f"person-{other}", response=str(number)) for other in range(30) for number in range(9)]
    assert filter_ratings([*rows, *agreed], RULES).evidence == {}
    alone = [row("ann", response=str(number), score=number % 2 == 0) for number in range(150)]
    assert filter_ratings(alone, RULES).evidence == {}


def test_numbers_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match="daily_cap=0: must be at least 1"):
        RatingRules(daily_cap=0)
    with pytest.raises(ConfigurationError, match=r"false_alarms=1\.0: must lie between 0 and 1"):
        RatingRules(false_alarms=1.0)


@pytest.mark.parametrize("time", [float("nan"), float("inf"), float("-inf"), 10**400])
def test_an_invalid_time_is_ignored(time: float) -> None:
    found = filter_ratings([row(at_s=time)], RULES)
    assert (len(found.kept), found.dropped) == (1, Counter())
    found = filter_ratings([row(at_s=time), row(score=False)], RULES)
    assert [one["score"] for one in found.kept] == [False]


@pytest.mark.parametrize("profile", opinions.PROFILES, ids=lambda one: "".join("01"[bit] for bit in one))
def test_what_is_written_is_read(profile: Profile) -> None:
    rng = np.random.default_rng(0)
    for _ in range(10):
        prompt = draw_prompt(rng)
        response = write_response(rng, prompt, profile)
        assert read_profile(prompt, response) == profile
        assert 1 <= len(response.split()) <= LONG[1]
        assert set(response.split()) | set(prompt.split()) <= set(WORDS)


def test_profiles_and_topics_come_as_often_as_their_chances_say() -> None:
    rng = np.random.default_rng(1)
    drawn = np.array([draw_profile(rng) for _ in range(20_000)], np.float64)
    assert opinions.profile_chances(REFERENCE).sum() == pytest.approx(1)
    assert drawn.mean(0) == pytest.approx(opinions.profile_chances(REFERENCE) @ opinions.FEATURES, abs=0.02)
    assert {topic_of(draw_prompt(rng)) for _ in range(100)} == set(TOPICS)


def test_a_response_is_on_topic_by_the_topic_of_its_prompt() -> None:
    assert (topic_of("how soil rose"), topic_of("hello")) == ("garden", "")
    assert read_profile("how soil rose", "seed").on_topic
    assert not read_profile("why train map", "seed").on_topic
    assert not read_profile("why train map", "seed ticket").on_topic
    assert not read_profile("why train map", "").brief


def test_kinds_are_equally_many_and_few_lie() -> None:
    people = population(60, seed=7).people
    assert set(Counter(one.kind for one in people).values()) == {20}
    assert sum(one.is_liar for one in people) == 3
    assert people == population(60, seed=7).people
    with pytest.raises(ValueError, match="count=0: a population has at least one person"):
        population(0, seed=0)


def test_a_liar_gives_the_opposite_with_the_same_probability() -> None:
    people = population(3, seed=0)
    honest, liar = Person("a", 1, is_liar=False), Person("b", 1, is_liar=True)
    for seed in range(200):
        prompt = draw_prompt(np.random.default_rng(seed))
        one, two = (draw_response(np.random.default_rng(seed + more), prompt) for more in (1, 1000))
        told = []
        for person in (honest, liar):
            rng = np.random.default_rng(seed)
            told.append(
                (
                    people.thumb(rng, person, prompt, one),
                    opinions.rate(rng, person, opinions.CRITERIA[0], prompt, one),
                    opinions.prefers_first(people, rng, person, prompt, one, two),
                )
            )
        assert told[1] == (not told[0][0], 6 - told[0][1], not told[0][2])


def thumb(number: int, **fields: Any) -> dict[str, Any]:
    return {"prompt": f"question {number}", "response": "a", "key": "thumb", "score": True, **fields}


def test_each_member_learns_from_half_of_the_prompts_and_always_the_same() -> None:
    found = list(with_members([thumb(number) for number in range(400)]))
    seen = {name: {one["prompt"] for one in found if one["key"] == name} for name in ("thumb", *MEMBERS)}
    assert len(seen["thumb"]) == 400
    assert all(150 < len(seen[name]) < 250 for name in MEMBERS)
    assert all(seen[one] - seen[other] for one in MEMBERS for other in MEMBERS if one != other)
    again = list(with_members([thumb(7, rater="ann"), thumb(7, rater="bob", score=False)]))
    assert {one["key"] for one in again if one["rater"] == "ann"} == {
        one["key"] for one in again if one["rater"] == "bob"
    }


def test_members_are_heads_of_no_weight_and_disagree_where_thumbs_are_learned() -> None:
    heads = member_heads(["thumb=thumbs", "safety=stars"])
    assert heads == [f"{name}=thumbs" for name in MEMBERS]
    assert member_weights(heads) == [f"{name}=0" for name in MEMBERS]
    assert member_heads(["safety=stars"]) == []
    rows = [thumb(1, key="safety"), {"prompt": "p", "chosen": "a", "rejected": "b"}]
    assert list(with_members(rows)) == rows, "what is no thumb is left as it is"
    assert len(list(with_members([thumb(1, prompt=7)]))) == 1
    shares = dict.fromkeys(MEMBERS, 0.5)
    assert disagreement({**shares, "thumb": 0.9}) == 0.0
    assert disagreement({**shares, MEMBERS[0]: 1.0, MEMBERS[1]: 0.0}) == pytest.approx(0.125**0.5)
    assert disagreement({"thumb": 0.9}) is None
    assert without_members({**shares, "thumb": 0.9}) == {"thumb": 0.9}


def test_each_rating_counts_once_and_a_round_reads_no_later_ones(tmp_path: Path) -> None:
    with loop_stand(tmp_path) as stand:
        stand.rate(5)
        new = NewRatings(POLICY, 2)
        assert (new.look(stand.registry), new.look(stand.registry), new.newest) == (3, 3, 5)
        stand.rate(2, begin=5)
        assert (new.look(stand.registry), new.newest) == (5, 7)
        rows = believed(stand.registry, POLICY, 5)
        assert [row["number"] for row in rows] == [1, 2, 3, 4, 5]
        assert new_among(rows, 3) == 2
        stand.registry.delete_ratings("", "person-4")
        assert [row["number"] for row in believed(stand.registry, POLICY, 7)][3:] == [4, 6, 7]


def test_prompts_of_people_and_of_the_run_are_used_once_each(tmp_path: Path) -> None:
    said = [{"role": "user", "content": "hi"}]
    more = [*said, {"role": "user", "content": "more"}]
    file = tmp_path / "prompts.jsonl"
    write_rows(file, [{"prompt": said}, {"prompt": "old"}, {"response": "x"}])
    with file.open("a") as out:
        out.write("no json\n")
    rows = [{"prompt": said}, {"prompt": more}, {"prompt": said}]
    assert [one["prompt"] for one in replayed_prompts(rows, str(file))] == [said, more, "old"]
    assert replayed_prompts(rows[:1], "") == [{"prompt": said}]


def made(folder: Path, name: str) -> Path:
    """A round's reward model, as far as its card goes."""
    folder.mkdir()
    card = {
        "base": "base",
        "checks": [{"ids": [1, 2], "given": [0.5]}],
        "trained": {"settings": {"epochs": 1}, "bad_rows_shown": ["line 3: what somebody wrote"]},
    }
    (folder / "heads.json").write_text(json.dumps(card))
    (folder / "adapter_model.safetensors").write_text(name)
    return folder


def test_the_newest_reward_model_is_kept_without_peoples_texts(tmp_path: Path) -> None:
    endpoint = {"role": "reward", "address": "127.0.0.1:1", "metrics_port": 0, "pid": 1}
    (tmp_path / "judge.json").write_text(json.dumps(endpoint))
    with ServedJudge(tmp_path) as served:
        served.look()
        assert judge_address(tmp_path) == "", "without a model nothing is served"
    (tmp_path / f".{JUDGE}-new").mkdir()
    for name in ("one", "two"):
        keep_judge(tmp_path, made(tmp_path / name, name))
        assert (tmp_path / JUDGE / "adapter_model.safetensors").read_text() == name
    card = json.loads((tmp_path / JUDGE / "heads.json").read_text())
    assert card == {"base": "base", "checks": [], "trained": {"settings": {"epochs": 1}}}
    assert {path.name for path in tmp_path.iterdir()} - {"judge.json"} == {JUDGE, "one", "two"}


ORDER = LoopOrder(weights=("thumb=2", "safety=3"))
EVERY = {"thumb": 2.0, "relevance": 1.0, "helpfulness": 1.0, "safety": 3.0, "preferred": 0.0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_state(tmp_path, LoopState(order=ORDER.shown()))
    return tmp_path


def test_a_changed_weight_replaces_the_one_of_the_start(folder: Path) -> None:
    assert standing_weights(ORDER.shown(), read_head_weights(folder)) == EVERY
    assert weigh(folder, {"safety": 0.5}, "it is safe by now", "ann") == {**EVERY, "safety": 0.5}
    assert weigh(folder, {"thumb": 0}, "stars alone", "bob") == {**EVERY, "safety": 0.5, "thumb": 0.0}
    found = read_head_weights(folder)
    assert found.standing == {"safety": 0.5, "thumb": 0.0}
    assert [(one.weights, one.reason, one.by) for one in found.changes] == [
        ({"safety": 0.5}, "it is safe by now", "ann"),
        ({"thumb": 0}, "stars alone", "bob"),
    ]
    words = ORDER.reward_words(["thumb=thumbs", "safety=stars"], found.standing)
    said = dict(one.removeprefix("--weight=").split("=") for one in words if one.startswith("--weight="))
    assert (float(said["thumb"]), float(said["safety"])) == (0.0, 0.5)


def test_a_reward_model_has_the_weights_of_the_heads_that_it_has(folder: Path) -> None:
    weigh(folder, {"safety": 2.0}, "why not", "ann")
    words = ORDER.reward_words(["thumb=thumbs"], read_head_weights(folder).standing)
    weights = [one for one in words if one.startswith("--weight=")]
    assert [one for one in weights if "thumb-" not in one] == ["--weight=thumb=2"]


def test_invalid_weights_are_refused_and_change_nothing(folder: Path) -> None:
    weigh(folder, {"safety": 0.5}, "before", "ann")
    before = read_head_weights(folder)
    for weights, message in (
        ({"security": 1.0}, "weight security=1: there is no such head; use thumb, relevance"),
        ({"thumb": -1.0}, "weight thumb=-1: must be 0 or more, and finite"),
        ({"thumb": float("nan")}, "weight thumb=nan: must be 0 or more, and finite"),
        ({"thumb": float("inf")}, "weight thumb=inf: must be 0 or more, and finite"),
        ({"thumb": 1e308, "safety": 1e308}, "the weights have no finite sum: make them smaller"),
        (dict.fromkeys(EVERY, 0.0), "all weights are 0: give at least one head a weight above 0"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            weigh(folder, weights, "why not", "ann")
        assert read_head_weights(folder) == before


def test_a_head_removed_from_the_loop_is_left_out(folder: Path) -> None:
    weigh(folder, {"safety": 0.5}, "it is safe by now", "ann")
    other = LoopOrder(heads=("charm=0:10",)).shown()
    assert standing_weights(other, read_head_weights(folder)) == {"charm": 1.0, "preferred": 0.0}
    weigh(folder, {"thumb": 0.0}, "stars alone", "ann")
    thumbs = LoopOrder(heads=("thumb=thumbs",)).shown()  # which is told, and the training refuses it
    assert standing_weights(thumbs, read_head_weights(folder)) == {"thumb": 0.0, "preferred": 0.0}


def test_simultaneous_changes_are_all_kept(folder: Path) -> None:
    weigh(folder, {"relevance": 7.0}, "first", "ann")
    each = MOST_CHANGES // 4

    def change(name: str) -> None:
        for number in range(each):
            weigh(folder, {name: float(number)}, "again", name)

    threads = [threading.Thread(target=change, args=(name,)) for name in EVERY if name != "relevance"]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    found = read_head_weights(folder)
    assert found.standing == {name: 7.0 if name == "relevance" else each - 1.0 for name in EVERY}
    assert len(found.changes) == MOST_CHANGES
    assert {one.reason for one in found.changes} == {"again"}


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"standing": {"thumb": "x"}, "changes": []}', "\x00"])
def test_a_damaged_file_is_refused_with_a_remedy(folder: Path, text: str) -> None:
    (folder / "weights.json").write_text(text)
    with pytest.raises(ConfigurationError, match=r"weights\.json: cannot be read .* move it away"):
        read_head_weights(folder)


def test_the_command_changes_weights_and_prints_them(tmp_path: Path) -> None:
    with loop_stand(tmp_path) as stand:
        words = ["weigh", str(stand.run.folder), "--weight", "safety=2", "--weight", "thumb=0.5"]
        done = CliRunner().invoke(loop_commands, [*words, "--reason", "children read it"])
        assert (done.exit_code, done.stderr) == (0, "")
        every = "thumb 0.5, relevance 1, helpfulness 1, safety 2, preferred 0"
        assert done.stdout == f"weights from the next reward model on: {every}\n"
        (change,) = read_head_weights(folder_of(stand.run.folder)).changes
        assert (change.reason, change.weights) == ("children read it", {"safety": 2.0, "thumb": 0.5})
        bad = CliRunner().invoke(loop_commands, [*words[:2], "--weight", "charm=1", "--reason", "x"])
        assert bad.exit_code == 2
        assert "weight charm=1: there is no such head; use thumb" in bad.stderr
        for command in (words, ["pause", str(stand.run.folder)]):
            for reason in (" ", "x" * 2000):
                bad = CliRunner().invoke(loop_commands, [*command, "--reason", reason])
                assert (bad.exit_code, bad.stdout) == (2, ""), reason
                assert "say in 1 to 1024 characters what the audit shall show" in bad.stderr
        assert len(read_head_weights(folder_of(stand.run.folder)).changes) == 1
        assert read_pause(folder_of(stand.run.folder)) is None
