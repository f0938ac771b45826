import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
from fastapi.testclient import TestClient

from penstock.config.settings import Settings
from penstock.gateway.frame.event_stream import ENDING
from penstock.gateway.frame.route_access import PROJECT_HEADER
from penstock.gateway.jobs import job_queue
from penstock.gateway.jobs.job_records import Conclusion, Outcome, TrainedVersion
from penstock.gateway.store.tables import JobState, Role
from penstock.gateway.upstream import RunSettings
from penstock.launch.gateway.job_templates import configured, read_templates
from penstock.launch.gateway.local_runner import LocalRunner
from penstock.workloads.goals.http.goals_service import service as goals
from penstock.workloads.goals.injection_journal import VETOES, last_switch
from penstock.workloads.language.feedback import Source, parse_scale, read, summary
from penstock.workloads.language.pretraining import tiny_models
from penstock.workloads.language.settings import RewardTraining
from penstock.workloads.rlhf.policy_service import FeedbackTraining, TrainingEstimate, service
from penstock.workloads.rlhf.preparation import MANIFEST, RESULTS
from tests.support.chat.chat_stand import chat_app, upstream_of
from tests.support.gateway.job_templates import goal, write_goals
from tests.support.gateway.printed_answers import ASKED, DRY_RUN, GIVEN, LISTED, TRAINED, differences
from tests.support.gateway.small_gateway import SmallGateway
from tests.support.language.text_stand import WORDS, teach
from tests.support.language.tiny_models import chat_tokenizer

TEMPLATES: Final = Path(__file__).parents[3] / "penstock" / "recipes" / "service"
FEEDBACK: Final = "/api/policies/feedback/my_agent"
TRAIN: Final = "/api/policies/train_policy/my_agent"
POLICIES: Final = "/api/policies/my_agent"


@pytest.fixture
def gateway(database_url: str, tmp_path: Path) -> SmallGateway:
    runner = LocalRunner(tmp_path / "jobs", TEMPLATES)
    return SmallGateway.in_folder(tmp_path, database_url, runner=runner, services=[service()])


@pytest.fixture
def editor(gateway: SmallGateway) -> dict[str, str]:
    return gateway.token("alpha")


def post(gateway: SmallGateway, path: str, caller: dict[str, str], body: Any, **headers: str) -> Any:
    return gateway.client.post(path, json=body, headers=caller | headers)


def give(gateway: SmallGateway, caller: dict[str, str], count: int) -> None:
    for number in range(count):
        body = {"prompt": f"question {number}", "response": "yes of course", "score": number / 20}
        assert post(gateway, FEEDBACK, caller, body).status_code == 200


def trained(gateway: SmallGateway, agent: str, label: str, mean: float | None) -> str:
    job = gateway.submit(agent, template="rlhf")
    made = TrainedVersion(
        version=label,
        model_path=f"models/alpha/{agent}/{label}/policy",
        reward_model_path=f"models/alpha/{agent}/{label}/reward_model",
        feedback_count=int(label[1:]),
        reward_mean=mean,
        reward_std=0.25,
    )
    outcome, conclusion = Outcome(state=JobState.FINISHED), Conclusion(result={}, version=made)
    gateway.accounts.run(lambda session, now: job_queue.settle(session, now, job.id, outcome, conclusion))
    return job.id


def test_submit_feedback(gateway: SmallGateway, editor: dict[str, str]) -> None:
    body = {"prompt": "2 + 2?", "response": "4", "score": 0.9, "runId": "run-1", "notes": "right"}
    reply = post(gateway, FEEDBACK, editor, body)
    assert reply.status_code == 200
    assert reply.json().keys() == {"id", "agentId", "createdAt"}
    (kept,) = gateway.registry.ratings("alpha/my_agent")
    rating = kept.rating
    assert (kept.public_id, rating.project) == (reply.json()["id"], "alpha")
    assert (rating.prompt, rating.response, rating.score, rating.run, rating.notes) == tuple(body.values())
    assert len(rating.rater) == 32


@pytest.mark.parametrize("score", [-0.1, 1.1, "NaN", None, "high", True])
def test_submit_feedback_invalid_score(gateway: SmallGateway, editor: dict[str, str], score: Any) -> None:
    content = '{"prompt": "a", "response": "b", "score": NaN}' if score == "NaN" else None
    body = None if content else {"prompt": "a", "response": "b", "score": score}
    headers = editor | {"Content-Type": "application/json"}
    reply = gateway.client.post(FEEDBACK, content=content, json=body, headers=headers)
    assert (reply.status_code, reply.json()["field"]) == (422, "score")
    assert gateway.registry.ratings("alpha/my_agent") == ()


def test_list_policies_empty(gateway: SmallGateway, editor: dict[str, str]) -> None:
    assert gateway.get(POLICIES, editor).json() == []


def test_list_policies_with_data(gateway: SmallGateway, editor: dict[str, str]) -> None:
    ids = [trained(gateway, "my_agent", "v15", 0.5), trained(gateway, "my_agent", "v20", None)]
    trained(gateway, "another", "v11", 0.1)
    found = gateway.get(POLICIES, editor).json()
    assert [(one["id"], one["version"], one["feedbackCount"]) for one in found] == [
        (ids[1], "v20", 20),
        (ids[0], "v15", 15),
    ]
    assert [one["metrics"] for one in found] == [
        {"rewardMean": None, "rewardStd": 0.25},
        {"rewardMean": 0.5, "rewardStd": 0.25},
    ]
    assert found[1]["modelPath"] == "models/alpha/my_agent/v15/policy"
    assert gateway.get(POLICIES, gateway.token("beta")).json() == []
    gateway.person("eve", "beta", Role.OWNER)
    assert gateway.get(POLICIES, gateway.bearer("eve") | {PROJECT_HEADER: "alpha"}).status_code == 404


def test_train_policy_insufficient_feedback(gateway: SmallGateway, editor: dict[str, str]) -> None:
    give(gateway, editor, 9)
    for asked in ({}, {"dryRun": True}):
        reply = post(gateway, TRAIN, editor, asked)
        assert (reply.status_code, reply.json()["error"]) == (400, "insufficient")
        assert "9 ratings: give at least 10" in reply.json()["detail"]
    for _ in range(10):
        body = {"prompt": "the same", "response": "yes", "score": 0.5}
        post(gateway, "/api/policies/feedback/other", editor, body)
    reply = post(gateway, "/api/policies/train_policy/other", editor, {})
    assert (reply.status_code, "one prompt" in reply.json()["detail"]) == (400, True)


def test_a_number_out_of_bounds_is_refused_with_its_field(
    gateway: SmallGateway, editor: dict[str, str]
) -> None:
    give(gateway, editor, 10)
    for wrong, field in (
        ({"maxSteps": 0}, "maxSteps"),
        ({"maxSteps": 10**400}, "maxSteps"),
        ({"preset": "no"}, "preset"),
        ({"preset": "no", "dryRun": True}, "preset"),
        ({"model": "/etc/passwd"}, "model"),
    ):
        reply = post(gateway, TRAIN, editor, wrong)
        assert (reply.status_code, reply.json()["field"]) == (422, field), reply.text


def test_a_caller_that_does_not_wait_gets_the_address_of_the_job(
    gateway: SmallGateway, editor: dict[str, str]
) -> None:
    give(gateway, editor, 10)
    asked = {"Prefer": "wait=0", "Idempotency-Key": "k"}
    first = post(gateway, TRAIN, editor, {"maxSteps": 8}, **asked)
    assert first.status_code == 202, first.text
    place = first.headers["Location"]
    assert gateway.get(place, editor).json()["state"] == "queued"
    assert gateway.get(place, editor).json()["numbers"]["maxSteps"] == 8
    assert post(gateway, TRAIN, editor, {"maxSteps": 8}, **asked).json() == first.json()
    assert post(gateway, TRAIN, editor, {"maxSteps": 8}, Prefer="wait=0").status_code == 409
    assert gateway.client.post(f"{place}/cancel", headers=editor).status_code == 200
    ended = post(gateway, TRAIN, editor, {"maxSteps": 8}, **asked)
    assert (ended.status_code, ended.json()["error"]) == (409, "cancelled")


def test_a_waiting_caller_gets_the_address_of_the_job_when_the_gateway_ends(
    gateway: SmallGateway, editor: dict[str, str]
) -> None:
    give(gateway, editor, 10)
    ending = asyncio.Event()
    ending.set()
    gateway.client.app_state[ENDING] = ending
    reply = post(gateway, TRAIN, editor, {"maxSteps": 8})
    assert reply.status_code == 202, reply.text
    assert gateway.get(reply.headers["Location"], editor).json()["state"] == "queued"


def test_a_reward_model_is_used_again_by_the_label_of_its_version(
    gateway: SmallGateway, editor: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    give(gateway, editor, 10)
    trained(gateway, "my_agent", "v15", 0.5)
    trained(gateway, "another", "v11", 0.5)
    for unknown in ("v11", "v16", "models/alpha/my_agent/v15/reward_model", "../v15"):
        for dry in (False, True):
            reply = post(gateway, TRAIN, editor, {"rewardModel": unknown, "dryRun": dry})
            assert (reply.status_code, reply.json()["field"]) == (422, "rewardModel"), reply.text
    gone = post(gateway, TRAIN, editor, {"rewardModel": "v15"})
    assert (gone.status_code, gone.json()["field"]) == (409, "rewardModel")
    (tmp_path / "models/alpha/my_agent/v15/reward_model").mkdir(parents=True)
    asked = {"Prefer": "wait=0", "Idempotency-Key": "k"}
    first = post(gateway, TRAIN, editor, {"rewardModel": "v15"}, **asked)
    assert first.status_code == 202, first.text
    assert post(gateway, TRAIN, editor, {"rewardModel": "v15"}, **asked).json() == first.json()
    assert post(gateway, TRAIN, editor, {}, **asked).status_code == 409
    job = gateway.accounts.look(lambda session: job_queue.get(session, "alpha", first.json()["policyId"]))
    assert (job.facts["rewardModel"], job.facts["feedbackCount"]) == ("v15", 10)
    stranger = post(gateway, TRAIN, gateway.token("beta"), {"rewardModel": "v15"})
    assert (stranger.status_code, stranger.json()["field"]) == (422, "rewardModel")


def test_a_training_that_failed_is_500_with_its_cause(gateway: SmallGateway, editor: dict[str, str]) -> None:
    give(gateway, editor, 10)
    asked = {"Prefer": "wait=0", "Idempotency-Key": "k"}
    id_ = post(gateway, TRAIN, editor, {}, **asked).json()["policyId"]
    outcome = Outcome(state=JobState.FAILED, cause="no room on the disk")
    gateway.accounts.run(lambda session, now: job_queue.settle(session, now, id_, outcome, None))
    reply = post(gateway, TRAIN, editor, {}, **asked)
    assert (reply.status_code, reply.json()["error"]) == (500, "training_failed")
    assert reply.json()["detail"] == "no room on the disk"


def test_the_printed_examples_are_answered_field_by_field(
    gateway: SmallGateway, editor: dict[str, str], tmp_path: Path
) -> None:
    give(gateway, editor, 9)
    assert post(gateway, FEEDBACK, editor, GIVEN).status_code == 200
    key = {"Idempotency-Key": "k"}
    job = post(gateway, TRAIN, editor, ASKED, Prefer="wait=0", **key).json()["policyId"]
    run = tmp_path / "job" / "run"
    for made in ("policies/v1", "reward_model"):
        (run / made).mkdir(parents=True)
    (run / MANIFEST).write_text('{"policy": "policies/v1"}')
    (run / RESULTS).write_text("{}")
    summary = {"updates": 1000, "evaluation": {"mean": 0.75, "std": 0.12}}
    outcome = Outcome(state=JobState.FINISHED, summary=summary)
    found = gateway.accounts.look(lambda session: job_queue.get(session, "alpha", job))
    places = {"folder": run.parent, "models": tmp_path / "models"}
    conclusion = FeedbackTraining().conclude(found, outcome, [], **places)
    gateway.accounts.run(lambda session, now: job_queue.settle(session, now, job, outcome, conclusion))
    assert differences(TRAINED, post(gateway, TRAIN, editor, ASKED, **key).json()) == []
    assert differences(LISTED, gateway.get(POLICIES, editor).json()) == []
    config = DRY_RUN["modelConfig"] | {"max_steps": 1000}
    TrainingEstimate.model_validate(DRY_RUN | {"modelConfig": config})


def test_a_deletion_names_the_trainings_that_used_it(gateway: SmallGateway, editor: dict[str, str]) -> None:
    trained(gateway, "my_agent", "v15", 0.5)
    give(gateway, editor, 10)
    asked = {"Prefer": "wait=0"}
    waits = post(gateway, TRAIN, editor, {"maxSteps": 8}, **asked).json()["policyId"]
    rater = gateway.registry.ratings("alpha/my_agent")[0].rating.rater
    gateway.person("ada", "alpha", Role.OWNER)
    path, owner = f"/api/projects/alpha/raters/{rater}", gateway.bearer("ada")
    gone = gateway.client.delete(path, headers=owner).json()
    assert gone == {"deleted": 10, "lateRewards": 0, "trainedFrom": []}
    give(gateway, editor, 10)
    gateway.client.post(f"/api/projects/alpha/jobs/{waits}/cancel", headers=editor)
    began = post(gateway, TRAIN, editor, {"maxSteps": 8}, **asked).json()["policyId"]
    gateway.accounts.run(lambda session, now: job_queue.claim(session, now, "here", 2))
    done = gateway.client.delete(path, headers=owner).json()
    assert done["deleted"] == 10
    assert done["trainedFrom"] == [
        {"project": "alpha", "agent": "my_agent", "job": began, "state": "running", "version": None}
    ]


@pytest.mark.parametrize("preset", ["quick", "rlhf", "small", "production"])
def test_the_shipped_presets_are_configurations(preset: str) -> None:
    template = read_templates(TEMPLATES)[preset]
    assert template.kind == "rlhf"
    recipe = configured(template, template.chosen({"maxSteps": 7, "learningRate": 1e-5}))
    settings = Settings.model_validate(recipe)
    assert (settings.learner.total_updates, settings.algorithm.name) == (7, "token_ppo")
    assert settings.learner.total_steps >= 7 * recipe["algorithm"]["batch_steps"]
    RewardTraining.model_validate(recipe["environment"]["kwargs"]["reward_training"])


def test_pairs_are_trained_on_as_scores_are(
    gateway: SmallGateway, editor: dict[str, str], tmp_path: Path
) -> None:
    for number in range(10):
        pair = {"prompt": f"question {number % 5}", "chosen": f"yes {number}", "rejected": "no"}
        reply = post(gateway, "/api/projects/alpha/agents/my_agent/pairs", editor, pair)
        assert reply.status_code == 201, reply.text
    kind = FeedbackTraining()
    facts = kind.facts(gateway.registry, "alpha/my_agent")
    assert (facts["feedbackCount"], facts["scoreMean"], facts["scoreStd"]) == (10, None, None)
    give(gateway, editor, 1)
    facts = kind.facts(gateway.registry, "alpha/my_agent")
    assert (facts["feedbackCount"], facts["scoreMean"], facts["scoreStd"]) == (11, 0.0, 0.0)
    settings = kind.prepare(gateway.registry, "alpha/my_agent", facts, tmp_path)
    said = settings["environment"]["kwargs"]
    found = read(Source(place=said["feedback"], scale=parse_scale(said["feedback_scale"])))
    assert (found.bad.count, summary(found.examples)) == (0, {"scored": 1, "pairs": 10})


KEPT = "\N{REPLACEMENT CHARACTER} done"


TOKENIZER = chat_tokenizer(*("\0" if word == "other" else word for word in WORDS))


def saying_nul(folder: Path) -> Path:
    model = tiny_models.build_model(TOKENIZER, seed=0)
    said = "<user> sum <eos> <assistant> \0 done <eos>"
    teach(model, [TOKENIZER(f"{said} {said}", add_special_tokens=False)["input_ids"]], 150)
    tiny_models.save(model, TOKENIZER, folder)
    return folder


def test_a_character_that_no_database_holds_is_replaced(
    database_url: str, tmp_path: Path, short_folder: Path
) -> None:
    base = saying_nul(tmp_path / "base")
    with upstream_of(base, tmp_path, short_folder / "text.sock", tokenizer=TOKENIZER) as run:
        known = RunSettings(task={}, registry=database_url, folder=tmp_path)
        app = chat_app(replace(run, settings=lambda: known), {}, None)
        with TestClient(app, base_url="http://127.0.0.1", raise_server_exceptions=False) as client:

            def post(what: str, **body: Any) -> Any:
                reply = client.post(f"/api/chat/{what}", json={"me": "somebody-1", **body})
                assert reply.status_code == 200, reply.text
                return reply

            talk = {"conversation": post("begin").json()["conversation"]}
            for _ in range(2):
                told = post("say", text="sum", **talk).text
            answer = json.loads(told.partition("event: answer\ndata: ")[2].partition("\n")[0])
            assert answer["text"] == "\0 done"
            post("thumb", turn=1, id="the-thumb", up=True, **talk)
            post("correct", turn=1, id="the-words", text="four", **talk)
            thumb, correction = post("mine").json()["ratings"]
            assert "event: answer" in post("say", text="sum", **talk).text
    assert [one["content"] for one in thumb["prompt"]] == ["sum", KEPT, "sum"]
    assert (thumb["response"], correction["response"], correction["rejected"]) == (KEPT, "four", KEPT)


INJECTORS: Final = "/api/projects/alpha/injectors"


@pytest.fixture
def routes_gateway(tmp_path: Path) -> SmallGateway:
    folder = tmp_path / "injectors" / "alpha" / "host"
    folder.mkdir(parents=True)
    write_goals(folder, goal("waits"), goal("done", injected=True), goal("low", held="threshold"))
    return SmallGateway.in_folder(tmp_path, services=[goals()])


def test_a_viewer_reads_and_an_editor_decides(routes_gateway: SmallGateway, tmp_path: Path) -> None:
    viewer, editor = routes_gateway.token("alpha", Role.VIEWER), routes_gateway.token("alpha")
    listed = routes_gateway.get(INJECTORS, viewer).json()["injectors"]
    assert [(one["name"], one["state"], one["auto"]) for one in listed] == [("host", "ended", False)]
    assert len(routes_gateway.get(f"{INJECTORS}/host", viewer).json()["goals"]) == 3
    auto, veto = (f"{INJECTORS}/host/auto", {"on": True}), (f"{INJECTORS}/host/vetoes", {"goalId": "waits"})
    assert routes_gateway.client.put(auto[0], json=auto[1], headers=viewer).status_code == 403
    assert routes_gateway.client.post(veto[0], json=veto[1], headers=viewer).status_code == 403
    folder = tmp_path / "injectors" / "alpha" / "host"
    assert not (folder / VETOES).exists()
    for _ in range(2):
        assert routes_gateway.client.put(auto[0], json=auto[1], headers=editor).status_code == 204
        assert routes_gateway.client.post(veto[0], json=veto[1], headers=editor).status_code == 204
    assert routes_gateway.actions("alpha").count("goal vetoed") == 2
    assert routes_gateway.actions("alpha").count("injector switched") == 2
    found = last_switch(folder)
    assert found is not None
    assert (found.on, found.by.startswith("token/")) == (True, True)
    assert {json.loads(line)["goal_id"] for line in (folder / VETOES).read_text().splitlines()} == {"waits"}


@pytest.mark.parametrize(
    ("goal_id", "status", "word"),
    [
        ("done", 409, "carried out already"),
        ("low", 409, "not carried out anyway: threshold"),
        ("x", 404, "no such goal"),
    ],
)
def test_a_veto_of_no_goal_is_refused(
    routes_gateway: SmallGateway, goal_id: str, status: int, word: str
) -> None:
    body = {"goalId": goal_id}
    reply = routes_gateway.client.post(
        f"{INJECTORS}/host/vetoes", json=body, headers=routes_gateway.token("alpha")
    )
    assert (reply.status_code, word in reply.json()["detail"]) == (status, True)


@pytest.mark.parametrize(
    "path", ["/absent", "/%2e%2e%2fbeta%2fhost", "/host%00", "/%2e%2e%2f%2e%2e%2falpha%2fhost"]
)
def test_a_name_is_looked_up_and_never_a_path(
    routes_gateway: SmallGateway, tmp_path: Path, path: str
) -> None:
    beside = tmp_path / "injectors" / "beta" / "host"
    beside.mkdir(parents=True)
    write_goals(beside, goal("secret"))
    reply = routes_gateway.get(f"{INJECTORS}{path}", routes_gateway.token("alpha"))
    assert reply.status_code in (404, 405), reply.text
    assert "secret" not in reply.text
    theirs = routes_gateway.get("/api/projects/beta/injectors", routes_gateway.token("alpha"))
    assert theirs.status_code in (403, 404)


def test_unreadable_files_are_reported(routes_gateway: SmallGateway, tmp_path: Path) -> None:
    folder = tmp_path / "injectors" / "alpha" / "host"
    write_goals(folder, {**goal("waits"), "confidence": 7})
    viewer = routes_gateway.token("alpha", Role.VIEWER)
    reply = routes_gateway.get(f"{INJECTORS}/host", viewer)
    assert reply.status_code == 409
    assert "goal_injections.jsonl: a line near the end: confidence='7'" in reply.json()["detail"]
    assert routes_gateway.get(INJECTORS, viewer).status_code == 200


def test_the_page_and_its_files_need_no_sign_in(routes_gateway: SmallGateway) -> None:
    for path, kind in (("/rl", "text/html"), ("/rl/rl.js", "text/javascript"), ("/rl/rl.css", "text/css")):
        reply = routes_gateway.client.get(path)
        assert reply.status_code == 200
        assert reply.headers["content-type"].startswith(kind)
    assert routes_gateway.client.get("/rl/goals_service.py").status_code == 404
    assert routes_gateway.client.get(INJECTORS).status_code == 401
