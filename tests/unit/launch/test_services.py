import json
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import ConfigurationError, load
from penstock.config.workload import find
from penstock.launch.commands.request import Request
from penstock.launch.run import services
from penstock.launch.run.memory import Memory
from penstock.launch.run.plan import Plan, make_plan, prepare_folder
from penstock.launch.run.services import private_folder, service_environment, service_specs
from penstock.launch.run.summary import Ending, RedisFacts, make_summary, summary_lines, write_summary
from penstock.launch.run.supervisor import Account, DrainStage, gone_by, without_configuration
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.feed.recording import RecordingWriter
from penstock.protocol.limits import SERVER_CALLS_S, SERVER_FLUSH_S
from tests.support.run.small_run import specification

# ---- What the services of a run are started with.


SHOW = (
    "import json, sys; from pathlib import Path; from penstock.config.service_settings import "
    "service_settings\n"
    "settings = service_settings(Path(sys.argv[1]), ())\n"
    "password = settings.security.redis_password\n"
    "print(json.dumps([settings.metrics.host, settings.metrics.port, password and "
    "password.get_secret_value()]))"
)


def seen_by_a_service(run_dir: Path, *assignments: str) -> list[object]:
    """Metrics host, port and Redis password in a service of such a run."""
    plan = make_plan(Request(what="CartPole-v1", run_dir=run_dir, assignments=assignments))
    prepare_folder(plan)
    environment = without_configuration({"PATH": ""}) | service_environment(plan.settings)
    done = subprocess.run(
        [sys.executable, "-c", SHOW, str(plan.config)],
        env=environment, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    return list(json.loads(done.stdout))


def test_a_metrics_port_of_the_configuration_is_not_shared_by_all_services(tmp_path: Path) -> None:
    seen = seen_by_a_service(tmp_path / "run", "metrics.port=9464", "metrics.host=0.0.0.0")
    assert seen == ["127.0.0.1", 0, None]


@pytest.mark.parametrize("password", ["hunter2", "12345", 'qu"ote\\ ü'])
def test_a_password_given_to_the_launcher_reaches_the_services(tmp_path: Path, password: str) -> None:
    assigned = f"security.redis_password={json.dumps(password, ensure_ascii=False)}"
    assert seen_by_a_service(tmp_path / "run", assigned)[2] == password
    assert password not in (tmp_path / "run" / "config.toml").read_text()


def test_without_a_password_the_services_get_none() -> None:
    assert "PENSTOCK_SECURITY__REDIS_PASSWORD" not in service_environment(load([]))


def test_a_broker_is_given_the_registry_of_the_run(tmp_path: Path) -> None:
    for assignments, url in (
        ((), f"sqlite:///{tmp_path}/run/registry.sqlite"),
        (("registry.url=postgresql://ada@db/penstock",), "postgresql://ada@db/penstock"),
    ):
        plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "run", assignments=assignments))
        commands = {spec.name: spec.command for spec in service_specs(plan, tmp_path)}
        assert commands["broker"][-2:] == ("--set", f"registry.url={url}")
        assert not any("registry.url" in word for word in commands["actor-0"])


def test_a_restarted_learner_does_not_restore_again(tmp_path: Path) -> None:
    prepare_folder(make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "run")))
    plan = make_plan(
        Request(run_dir=tmp_path / "run", resumption=ResumeOptions(resume=True, allow_loss=True, best=True))
    )
    (learner,) = (spec for spec in service_specs(plan, tmp_path) if spec.name == "learner")
    assert learner.command[-3:] == ("--resume", "--allow-loss", "--best")
    assert learner.on_restart == ("--newest",)
    with pytest.raises(ConfigurationError, match="--best: .*add --resume"):
        make_plan(Request(what="CartPole-v1", resumption=ResumeOptions(best=True)))


def test_a_run_from_a_recording_has_no_rollout_workers_and_records_nothing(tmp_path: Path) -> None:
    recording = tmp_path / "recording"
    RecordingWriter.begin(recording, specification(), "policy", 1).close()
    record = f"learner.record={tmp_path / 'other'}"
    prepare_folder(make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "a", assignments=(record,))))
    plan = make_plan(
        Request(
            what=str(tmp_path / "a" / "config.toml"),
            run_dir=tmp_path / "b",
            recording=recording,
            assignments=("algorithm.staleness=0",),
        )
    )
    assert (plan.settings.learner.feed_from, plan.settings.learner.record) == (recording, None)
    names = [spec.name for spec in service_specs(plan, tmp_path)]
    assert names == ["redis", "broker", "learner", "evaluator"]


def test_a_run_without_evaluations_has_no_evaluation_actor(tmp_path: Path) -> None:
    assignments = ("evaluation.episodes=0",)
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "run", assignments=assignments))
    assert [spec.name for spec in service_specs(plan, tmp_path)] == ["redis", "broker", "learner", "actor-0"]


def test_launchers_that_clean_the_same_folders_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    for index in range(200):
        folder = tmp_path / f"penstock-{index}"
        folder.mkdir()
        (folder / "launcher.pid").write_text("999999999")
    with ThreadPoolExecutor(8) as pool:
        made = {future.result() for future in [pool.submit(private_folder) for _ in range(8)]}
    assert set(tmp_path.glob("penstock-*")) == made
    assert len(made) == 8


def test_actors_of_this_machine_get_the_local_paths_of_the_run(tmp_path: Path) -> None:
    kwargs = {"model": "/models/a", "prompts": "/data/p.jsonl", "reward": str(tmp_path), "serve_reward": True}
    said = ("workload=rlhf", f"environment.kwargs={dump_inline(kwargs)}", 'actor.places.prompts="7"')
    plan = make_plan(Request(what="words", run_dir=tmp_path / "run", assignments=said))
    specs = {spec.name: spec.command for spec in service_specs(plan, tmp_path / "sockets")}
    assert list(specs)[-3:] == ["reward", "actor-0", "evaluator"]
    for name in ("actor-0", "evaluator"):
        told = [word for word in specs[name] if word.startswith("actor.places.")]
        assert told == [
            'actor.places.model="/models/a"',
            'actor.places.prompts="7"',
            f'actor.places.reward="unix:{tmp_path}/sockets/reward.sock"',
        ]
    assert "actor.places" not in " ".join(specs["learner"])


OWN_SERVICE = """
from penstock.config.workload import Services


def services(settings, sockets):
    return Services(commands={"oracle": ("oracle", "serve")})
"""


def test_every_service_is_in_a_stage_of_the_drain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own_service.py").write_text(OWN_SERVICE)
    monkeypatch.syspath_prepend(tmp_path)
    own = replace(find("control"), services="own_service:services")
    monkeypatch.setattr(services, "find", lambda _: own)
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path / "run"))
    stages = {spec.name: spec.stage for spec in service_specs(plan, tmp_path)}
    assert stages == {
        "redis": DrainStage.REDIS,
        "broker": DrainStage.BROKER,
        "learner": DrainStage.LEARNER,
        "oracle": DrainStage.SERVING,
        "actor-0": DrainStage.ACTING,
        "evaluator": DrainStage.ACTING,
    }
    assert list(gone_by(serves=True)) == list(DrainStage)


def test_a_policy_server_has_time_for_its_flush() -> None:
    serving, alone = gone_by(serves=True), gone_by(serves=False)
    assert serving[DrainStage.SERVING] - serving[DrainStage.ACTING] > SERVER_CALLS_S + SERVER_FLUSH_S
    assert list(serving.values()) == sorted(serving.values())
    assert alone[DrainStage.REDIS] < 15
    assert (
        serving[DrainStage.REDIS] - serving[DrainStage.SERVING]
        == alone[DrainStage.REDIS] - alone[DrainStage.SERVING]
    )


def dump_inline(kwargs: dict[str, object]) -> str:
    """As an inline table of TOML."""
    return "{" + ", ".join(f"{key} = {json.dumps(value)}" for key, value in kwargs.items()) + "}"


# ---- The summary of a run.


LEARNT = {
    "solved": True,
    "mean_return": 480.5,
    "training_episodes": 812,
    "evaluation": {"mean": 499.0, "std": 2.0, "episodes": 100, "version": 41},
    "env_steps": 80_000,
    "updates": 40,
    "policy_version": 41,
    "training_seconds": 3.5,
    "solved_at": {"seconds": 1.25, "env_steps": 70_000, "version": 36},
    "env_steps_per_second": 22_857.1,
    "staleness": {"p50": 1, "p99": 2, "max": 2},
    "ledger": {
        "acked": 81, "trained": 78, "dropped": {"stale": 1, "nan": 0}, "resident": 2, "balanced": True,
    },
}  # fmt: skip
REDIS = RedisFacts(version="6.2.14", durability="fsync_1s")


def plan_in(path: Path) -> Plan:
    """A prepared run."""
    plan = make_plan(Request(what="CartPole-v1", run_dir=path / "r", seed=3))
    prepare_folder(plan)
    return plan


def ending(cause: str = "") -> Ending:
    """Ended with one actor that was restarted once."""
    actor = Account(
        name="actor-0", role="actor", pid=7, restarts=1, cpu_seconds=1.23456, memory=Memory(3000, 1000)
    )
    return Ending(wall_seconds=9.5, interrupted=False, cause=cause, accounts=[actor], redis=REDIS)


def test_the_summary_holds_every_documented_field(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    summary = make_summary(plan, ending(), LEARNT)
    write_summary(plan.run_dir, summary)
    assert json.loads((plan.run_dir / "summary.json").read_text()) == summary
    assert summary.items() >= LEARNT.items()
    assert summary["target_return"] == 475.0
    assert (summary["run"], summary["workload"], summary["seed"]) == (plan.settings.run, "control", 3)
    assert summary["processes"] == [
        {"role": "actor", "pid": 7, "restarts": 1, "cpu_seconds": 1.235, "peak_memory_bytes": 3000}
    ]
    assert summary["peak_memory_bytes"] == 3000
    assert (summary["preparation_seconds"], summary["device_memory_bytes"]) == (0.0, None)
    assert summary["redis"] == {"version": "6.2.14", "durability": "fsync_1s"}
    assert "failure" not in summary


def test_the_printed_summary_has_the_verdict_and_the_books(tmp_path: Path) -> None:
    plan = plan_in(tmp_path)
    text = "\n".join(summary_lines(make_summary(plan, ending(), LEARNT)))
    assert text.startswith("CartPole-v1: solved")
    assert "time         3.5 s of training, 9.5 s in all" in text
    assert "solved after 1.2 s of training and 70,000 steps, by version 36" in text
    assert "balanced: 81 acked = 78 trained + 1 dropped (stale 1) + 2 resident" in text
    assert "499.0 ± 2.0 over 100 episodes of version 41" in text


BASE = {
    "mean": 300.0, "std": 20.0, "episodes": 100, "starts": 100, "length": 300.0, "version_length": 499.0,
    "difference": 199.0, "standard_error": 2.0, "low": 195.0, "high": 203.0, "verdict": "better",
}  # fmt: skip


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ({}, "+199.0 (95% interval +195.0 to +203.0): better than the base"),
        (
            {"difference": -1.0, "low": -4.0, "high": 2.0, "verdict": "chance"},
            "-1.0 (95% interval -4.0 to +2.0): cannot be told from chance",
        ),
        (
            {"difference": -9.0, "low": -12.0, "high": -6.0, "verdict": "worse"},
            "-9.0 (95% interval -12.0 to -6.0): worse than the base",
        ),
        (
            {"standard_error": None, "low": None, "high": None, "verdict": "chance"},
            "+199.0: cannot be told from chance",
        ),
    ],
)
def test_the_printed_summary_compares_with_the_initial_policy(
    tmp_path: Path, told: dict[str, object], said: str
) -> None:
    learnt = LEARNT | {"evaluation": {**LEARNT["evaluation"], "base": BASE | told}}  # type: ignore[dict-item]
    lines = summary_lines(make_summary(plan_in(tmp_path), ending(), learnt))
    place = next(index for index, line in enumerate(lines) if line.startswith("  evaluation "))
    assert lines[place + 1 : place + 4] == [
        "  base         300.0 ± 20.0 before any training, on the same 100 episodes",
        f"  difference   {said}",
        "  length       499.0 steps, of the base 300.0",
    ]


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("updates", "all updates are done"),
        ("rejected", "the algorithm's own validation rejected what was learned"),
        ("theatre", "the algorithm's own validation says theatre"),
        (None, "before the learner could say why"),
    ],
)
def test_the_printed_summary_says_why_the_run_ended(tmp_path: Path, word: str | None, said: str) -> None:
    learnt = LEARNT | {"ending": word, "restored_from": None}
    lines = summary_lines(make_summary(plan_in(tmp_path), ending(), learnt))
    assert any(line.endswith(f" {said}") for line in lines), lines


@pytest.mark.parametrize(
    ("told", "target", "said"),
    [
        ({}, None, "finished"),
        ({}, 475.0, "not solved"),
        ({"findings": {"verdict": "honest"}}, None, "honest"),
        ({"findings": {"verdict": "theatre"}, "base": "better"}, None, "theatre, better than the base"),
        ({"base": "better"}, None, "better than the base"),
        ({"base": "chance"}, 475.0, "cannot be told from chance, not solved"),
        ({"base": "worse", "interrupted": True}, 475.0, "worse than the base, interrupted"),
        ({"base": "better", "solved": True}, 475.0, "solved"),
        ({"base": "better", "cause": "redis failed"}, None, "failed"),
    ],
)
def test_the_printed_summary_begins_with_the_verdict_and_names_no_threshold_that_is_not_there(
    tmp_path: Path, told: dict[str, Any], target: float | None, said: str
) -> None:
    evaluation = LEARNT["evaluation"] | (  # type: ignore[operator]
        {"base": BASE | {"verdict": told["base"]}} if "base" in told else {}
    )
    learnt = LEARNT | {
        "solved": told.get("solved", False), "evaluation": evaluation, "findings": told.get("findings"),
    }  # fmt: skip
    plan = replace(plan_in(tmp_path), target=target)
    how = replace(ending(cause=told.get("cause", "")), interrupted=told.get("interrupted", False))
    assert summary_lines(make_summary(plan, how, learnt))[0] == f"CartPole-v1: {said}"


def test_a_run_whose_learner_reported_nothing_has_a_summary(tmp_path: Path) -> None:
    summary = make_summary(plan_in(tmp_path), ending(cause="redis failed 5 times in a row"), {})
    assert summary["failure"] == "redis failed 5 times in a row"
    assert summary["solved"] is False
    assert summary["ledger"] is None
    lines = summary_lines(summary)
    assert lines[0] == "CartPole-v1: failed"
    assert "–" not in "\n".join(lines)
