import json
import os
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from penstock.actor import specification as actor_run
from penstock.config.settings import ConfigurationError, LearnerSection, PolicySection
from penstock.launch.cli.app import app
from penstock.launch.commands import service_commands
from penstock.launch.commands.certificates import main
from penstock.launch.commands.doctor import Unfit, check_endpoint
from penstock.launch.commands.dry_run import Pace, ShortRun, check, lines, pace_of, predicted, shortened
from penstock.launch.commands.play import record
from penstock.launch.commands.plot import drawn, graph
from penstock.launch.commands.request import Order, Request
from penstock.launch.commands.service_commands import SERVING_EXPERIMENTS
from penstock.launch.inspection.curve import Point
from penstock.launch.run.plan import Plan, make_plan
from penstock.learner.checkpoint.resume_options import ResumeOptions
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.model import make_model
from penstock.learner.publish.kept_versions import FinalPolicy, write_specification
from penstock.policy import weights
from penstock.policy.policy import build
from penstock.protocol.spaces import Discrete
from penstock.registry.records import Evaluation, NewVersion, Origin, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import hold, kept_files, read_kept, registry_url, write_kept
from penstock.runtime.exit import EXIT_OK
from penstock.runtime.foreground import Foreground, SecuredForeground, unfolded
from tests.support.run.small_run import OBSERVATION, RUN, specification
from tests.support.run.solved_run import SOLVED_RUN
from tests.support.storage.postgresql_server import with_registry

# ---- `penstock certificates`: the folder that it writes to.


def mode(path: Path) -> int:
    """Of a file or folder, as chmod counts."""
    return stat.S_IMODE(path.stat().st_mode)


def test_a_new_folder_is_closed_to_other_users(tmp_path: Path) -> None:
    folder = tmp_path / "secrets"
    folder.mkdir(mode=0o755)
    assert main(Order(folder=folder, run="r")) == EXIT_OK
    assert mode(folder) == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder to somebody else")
def test_the_root_of_a_volume_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "volume"
    folder.mkdir()
    folder.chmod(0o777)
    os.chown(folder, 65532, 65532)
    assert main(Order(folder=folder, run="r")) == EXIT_OK
    assert mode(folder) == 0o777
    assert {mode(key) for key in folder.glob("*.key")} == {0o600}


# ---- What `penstock doctor` says of a server of a model.


@contextmanager
def server(status: int, body: bytes, seen: list[str]) -> Iterator[str]:
    """Answers every request alike; its address."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append(f"{self.path} {self.headers.get('Authorization')}")
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}/v1"
        finally:
            http.shutdown()
            thread.join()


def test_a_server_that_lists_its_models_is_well(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setenv("OPENAI_API_KEY", "sk-hidden")
    body = json.dumps({"data": [{"id": "tiny"}, {"id": "small"}]}).encode()
    with server(200, body, seen) as url:
        told = check_endpoint(f"{url}/")
    assert told.endswith("tiny, small")
    assert "sk-hidden" not in told
    assert seen == ["/v1/models Bearer sk-hidden"]


@pytest.mark.parametrize(
    ("status", "body", "why"),
    [
        (401, b"", "answers 401; set OPENAI_API_KEY"),
        (404, b"", "answers 404; is it the address that ends in /v1"),
        (200, b"<html>", "lists no models"),
        (200, b'{"data": 7}', "lists no models"),
    ],
)
def test_a_server_that_lists_no_models_is_reported_with_a_remedy(status: int, body: bytes, why: str) -> None:
    with server(status, body, []) as url, pytest.raises(Unfit, match=why) as told:
        check_endpoint(url.replace("http://", "http://me:secret@"))
    assert "secret" not in str(told.value)


@pytest.mark.parametrize("url", ["ftp://here/v1", "here:80", ""])
def test_an_invalid_address_is_refused(url: str) -> None:
    with pytest.raises(Unfit, match="is no address"):
        check_endpoint(url)


def test_a_port_without_a_listener_is_reported() -> None:
    with pytest.raises(Unfit, match="does not answer: .*is it started"):
        check_endpoint("http://127.0.0.1:9/v1")


# ---- The pace of a short run, extrapolated to all of the run.


PACE = Pace(seconds=20.0, steps=1000, updates=10, seconds_per_step=0.01)
SHORT = ShortRun(wall_seconds=35.0, training_seconds=21.0, is_whole=False, pace=PACE, memory={})


def row(seconds: float, steps: int, updates: int) -> dict[str, Any]:
    """A line of `metrics.jsonl` as far as the pace reads it."""
    return {"training_seconds": seconds, "env_steps": steps, "updates": updates}


def plan_in(folder: Path, *assignments: str) -> Plan:
    """For CartPole."""
    return make_plan(Request(what="CartPole-v1", run_dir=folder, seed=3, assignments=assignments))


def test_the_pace_is_measured_on_the_later_half() -> None:
    rows = [row(0.0, 0, 0), row(5.0, 100, 1), row(10.0, 200, 2)]
    rows += [row(10.0 + n, 200 + 100 * n, 2 + n) for n in range(1, 7)]
    pace = pace_of([*rows, row(30.0, 900, 9)])
    assert pace is not None
    assert (pace.seconds, pace.steps, pace.updates) == (16.0, 800, 8)
    assert pace.seconds_per_step == pytest.approx(0.01)


def test_two_slow_updates_are_enough() -> None:
    rows = [row(1.0, 0, 0), row(60.0, 100, 1), row(61.0, 100, 1), row(130.0, 200, 2), row(150.0, 200, 2)]
    assert pace_of(rows) == Pace(seconds=130.0, steps=200, updates=2, seconds_per_step=0.7)


@pytest.mark.parametrize(
    "rows", [[], [row(5.0, 100, 1)], [row(1.0, 50, 0), row(5.0, 100, 1), row(9.0, 200, 2)]]
)
def test_too_few_updates_give_no_pace(rows: list[dict[str, Any]]) -> None:
    assert pace_of(rows) is None


def test_all_steps_are_predicted_by_the_pace() -> None:
    assert predicted(LearnerSection(total_steps=100_000), SHORT) == pytest.approx(15 + 20 + 990)


def test_a_limit_of_updates_or_seconds_ends_the_run_sooner() -> None:
    section = LearnerSection(total_steps=100_000)
    assert predicted(section.model_copy(update={"total_updates": 50}), SHORT) == pytest.approx(15 + 20 + 40)
    assert predicted(section.model_copy(update={"total_seconds": 60.0}), SHORT) == pytest.approx(15 + 60)


def test_a_run_as_short_as_the_dry_run_is_not_extrapolated() -> None:
    for pace in (PACE, None):
        whole = replace(SHORT, is_whole=True, pace=pace)
        assert predicted(LearnerSection(total_steps=100_000), whole) == SHORT.wall_seconds


def test_minutes_and_peak_memory_are_printed_next_to_what_is_free() -> None:
    found: dict[str, Any] = {
        "environment": "E", "seed": 3, "total_steps": 9000, "seconds": 90.0, "preparation_seconds": 30.0,
        "measured": {"steps": 1000, "updates": 10, "seconds": 20.0, "seconds_per_step": 0.01},
        "memory_bytes": 2**30, "memory_bytes_by_role": {"actor": 2**20}, "device_memory_bytes": 2**21,
        "available": {"memory_bytes": 2**31, "device_memory_bytes": 2**22},
        "scores": {"feedback": {"count": 15, "mean": 0.7, "std": 0.1}},
    }  # fmt: skip
    text = "\n".join(lines(found))
    assert "time         1.5 minutes" in text
    assert "30.0 s of them are preparation" in text
    assert "1,000 steps and 10 updates in 20.0 s, then 100.0 steps a second" in text
    assert "memory       1.00 GiB at most, 2.00 GiB are free" in text
    assert "actor 1.0 MiB" in text
    assert "GPU memory   2.0 MiB at most, 4.0 MiB are free" in text
    assert "15 scores" in text
    assert "GPU" not in "\n".join(lines(found | {"device_memory_bytes": None}))


@pytest.mark.parametrize(
    ("assignments", "recording", "ui", "said"),
    [
        ((), True, False, "--dry-run --from"),
        ((), False, True, "--dry-run --ui"),
        (("serving.listen=127.0.0.1:0",), False, False, "--dry-run --serve"),
        (("broker.redis=redis://127.0.0.1:6379",), False, False, "--dry-run --redis"),
    ],
)
def test_a_dry_run_of_an_unpredictable_run_is_refused(
    assignments: tuple[str, ...], recording: bool, ui: bool, said: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigurationError, match=said):
        check(plan_in(tmp_path / "run", *assignments), recording=recording, ui=ui)


def test_a_short_run_reaches_no_other_service_and_ends_by_its_time(tmp_path: Path) -> None:
    asked = (
        "metrics.trackers=['tensorboard']",
        "evaluation.interval_steps=10",
        "evaluation.base=true",
    )
    plan = plan_in(
        tmp_path / "run", *asked, f"actor.ack_journal='{tmp_path}/journals'", "learner.record='record'"
    )
    settings = shortened(plan, tmp_path / "short", 20.0).settings
    assert (settings.learner.total_seconds, settings.learner.stop_at_target) == (20.0, False)
    assert settings.learner.total_steps == plan.settings.learner.total_steps
    assert settings.learner.record == tmp_path / "short" / "record"
    assert settings.actor.ack_journal == tmp_path / "short" / "journals"
    assert settings.metrics.trackers == ()
    assert settings.evaluation.interval_steps is None
    assert not settings.evaluation.base  # it is one more evaluation, beside the steps that are measured
    assert (settings.algorithm, settings.environment) == (plan.settings.algorithm, plan.settings.environment)


# ---- Commands whose options are the fields of a dataclass.


@dataclass(frozen=True, kw_only=True)
class Options:
    """An argument, a number with a bound, and options of another kind among them."""

    what: Annotated[Path | None, typer.Argument(metavar="[WHAT]", help="What.")] = None
    count: Annotated[int | None, typer.Option("--count", min=1, help="How many.")] = None
    resumption: ResumeOptions = field(default_factory=ResumeOptions)
    kept: int = 7


def taken(*said: str) -> tuple[int, list[tuple[Options, bool]]]:
    """Exit code, and what the command was called with."""
    app, calls = typer.Typer(), list[tuple[Options, bool]]()

    @app.command()
    @unfolded
    def command(options: Options, own: Annotated[bool, typer.Option("--own")] = False) -> None:
        calls.append((options, own))

    return CliRunner().invoke(app, said).exit_code, calls


def test_a_command_gets_its_options_as_one_value() -> None:
    assert taken() == (0, [(Options(), False)])
    said = taken("a", "--count", "2", "--resume", "--best", "--own")
    resumption = ResumeOptions(resume=True, best=True)
    assert said == (0, [(Options(what=Path("a"), count=2, resumption=resumption), True)])
    assert taken("--count", "0") == (2, [])


@pytest.mark.parametrize("resume", [True, False])
@pytest.mark.parametrize("best", [True, False])
def test_a_child_process_reads_the_options_written_for_it(resume: bool, best: bool) -> None:
    options = ResumeOptions(resume=resume, allow_loss=best, best=best)
    first = options.words(over=ResumeOptions())
    assert taken(*first) == (0, [(Options(resumption=options), False)])
    again = options.after_a_crash().words(over=options)
    assert taken(*first, *again) == (0, [(Options(resumption=options.after_a_crash()), False)])


# ---- The curve as text: every line fits, the labels are those of the curve, the dots lie where the
# values do.


def points(*values: float | None) -> list[Point]:
    """A point every 1,000 steps."""
    return [
        Point(
            env_steps=1000 * number, seconds=0.0, updates=number, version=1, mean_return=value, staleness=None
        )
        for number, value in enumerate(values)
    ]


@pytest.mark.parametrize("columns", [24, 80, 200])
def test_a_rising_curve_is_drawn_from_corner_to_corner(columns: int) -> None:
    text = drawn(points(*range(11)), columns, 8).splitlines()
    assert max(map(len, text[:-1])) <= columns
    assert len(text) == 8 + 2
    assert text[0].startswith("      10.0┤")
    assert text[7].startswith("     0.000┤")
    columns_of = [line.partition("┤")[2] for line in text[:8]]
    assert columns_of[0][-1] != "\u2800", "the last value is at the top"
    assert columns_of[7][0] not in ("", "\u2800"), "the first at the bottom"
    assert len(columns_of[0]) == max(map(len, columns_of))
    assert "10,000 steps" in text[8]
    assert text[9] == "mean return 10.0 of the last 100 training episodes, after 10,000 steps"


def test_unknown_values_are_left_out_of_the_summary() -> None:
    assert drawn(points(None, None), 80, 8) == "nothing learned yet"
    assert drawn([], 80, 8) == "nothing learned yet"
    assert "mean return 5.000" in drawn(points(None, 5.0), 80, 8)
    assert drawn(points(2.0, 2.0, 2.0), 40, 4).splitlines()[0].count("\u2809") > 20


def test_a_folder_without_a_run_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="so no run"):
        graph(tmp_path, once=True, interval=1.0)


# ---- `penstock record` plays what the run's actors played: with memory, frames and masks.


MENU = "Menu-v0"


@pytest.mark.parametrize(
    ("what", "settings"),
    [
        ("CartPole-v1", ("policy.recurrent=lstm", "policy.burn_in=2", "policy.frame_stack=2")),
        (MENU, ("environment.mask_key=action_mask",)),
        (MENU, ("environment.mask_key=action_mask", "algorithm.name=dqn", "policy.frame_stack=3")),
    ],
)
def test_a_policy_that_remembers_or_is_masked_is_recorded(
    what: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    small = ("environment.count=2", "actor.unroll_length=16")
    plan = make_plan(Request(what=what, run_dir=tmp_path / "r", assignments=(*settings, *small)))
    model = make_model(plan.settings)
    (policy,) = model.algorithm.published_modules().values()
    final = FinalPolicy(specification=model.specification, blob=weights.encode(policy), version=1, update=0)
    made = actor_run.read(model.specification, plan.settings.actor)
    account = record(made, final, tmp_path / "out", steps=200, seed=1, deterministic=False)
    assert account["steps"] >= 200
    content = Recording(tmp_path / "out")
    content.check_schema(model.specification.schema.schema_id)
    arrays: list[Any] = [one for _, one in content.load(content.fragments)]
    remembered = [name for name in arrays[1] if name.startswith("state/")]
    assert bool(remembered) == any(text.startswith("policy.") for text in settings)
    assert all(np.any(arrays[1][name]) for name in remembered)


# ---- What a service sets before what it is made of is loaded.


VARIABLE = "GRPC_EXPERIMENTS"


@pytest.mark.parametrize(
    ("given", "expected"), [(None, SERVING_EXPERIMENTS), ("", ""), ("-tcp_read_chunks", "-tcp_read_chunks")]
)
def test_a_policy_server_sets_how_grpc_polls_unless_it_is_set(
    given: str | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, given or "")
    if given is None:
        monkeypatch.delenv(VARIABLE)
    monkeypatch.setattr(Foreground, "run", lambda *_, **__: None)
    service_commands.serve(foreground=SecuredForeground())
    assert os.environ[VARIABLE] == expected


@pytest.mark.parametrize(
    ("experiments", "is_known"), [(SERVING_EXPERIMENTS, True), ("-no_such_thing", False)]
)
def test_grpc_knows_the_experiment(experiments: str, is_known: bool) -> None:
    script = "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={"PATH": "", VARIABLE: experiments}, capture_output=True, text=True, check=True, timeout=60,
    )  # fmt: skip
    assert ("Unknown experiment" not in done.stderr) == is_known


# ---- `penstock policy` on a real registry of a run that is over.


BLOBS = {
    version: weights.encode(build(OBSERVATION, Discrete(2), PolicySection(), seed=version))
    for version in (3, 5, 9)
}


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """A run with versions 3, 5 and 9; 3 is active."""
    write_specification(tmp_path, specification())
    with Registry.open(with_registry(registry_url(tmp_path)), migrate=True) as registry:
        for version, blob in BLOBS.items():
            write_kept(tmp_path, version, blob)
            registry.register(
                NewVersion(
                    policy="default",
                    version=version,
                    run=RUN,
                    update=version,
                    sha256=weights.sha256(blob),
                    size_bytes=len(blob),
                    origin=Origin.BEST,
                    evaluation=Evaluation(mean=10.0 * version, std=1.0, episodes=2),
                    reason="a test",
                ),
                by="test",
            )
        registry.promote("default", 3, "first", by="test")
    return tmp_path


def said(*arguments: str, code: int = 0) -> str:
    """What `penstock policy` prints."""
    result = CliRunner().invoke(app, ["policy", *arguments])
    assert result.exit_code == code, result.output
    return result.output


def told(*arguments: str) -> Any:
    """The same as JSON."""
    return json.loads(said(*arguments, "--json"))


def test_a_list_shows_every_version_and_the_traffic(run_dir: Path) -> None:
    lines = said("list", str(run_dir)).splitlines()
    assert lines[0].split() == [
        "version", "status", "origin", "update", "evaluation", "parent", "registered", "reason",
    ]  # fmt: skip
    assert lines[1].startswith("3        active     best    3       30 ± 1 over 2")
    assert [line.split()[0] for line in lines[1:4]] == ["3", "5", "9"]
    assert lines[4].startswith("traffic: canary 0, latest 0, active 1 of the clients")
    content = told("list", str(run_dir))
    assert [one["version"] for one in content["versions"]] == [3, 5, 9]
    assert content["versions"][0]["evaluation"] == {"mean": 30.0, "std": 1.0, "episodes": 2}
    assert content["traffic"]["revision"] == 1


def test_a_registry_is_named_by_its_url_too(run_dir: Path) -> None:
    url = registry_url(run_dir)
    assert told("list", url) == told("list", str(run_dir)) == told("list", str(run_dir), "--registry", url)


def test_show_prints_decisions_and_whether_the_weights_are_intact(run_dir: Path) -> None:
    shown = told("show", str(run_dir), "3")
    assert shown["weights"] == "held, undamaged"
    assert [event["action"] for event in shown["events"]] == ["registered", "promoted"]
    (run_dir / "policies" / "3.safetensors").write_bytes(b"x")
    assert "damaged" in said("show", str(run_dir), "3")


def test_promote_moves_the_arm_and_records_the_caller(run_dir: Path) -> None:
    share = ("--to", "canary", "--canary-share", "0.25")
    assert said("promote", str(run_dir), "5", *share, "--reason", "try") == "version 5 of default: canary\n"
    assert told("traffic", str(run_dir))["canary_share"] == 0.25
    assert told("promote", str(run_dir), "5", "--reason", "good")["status"] == "active"
    shown = told("show", str(run_dir), "5")
    assert shown["events"][-1]["by"].startswith("operator")
    assert shown["events"][-1]["reason"] == "good"


def test_a_rollback_gives_the_old_content_a_new_number(run_dir: Path) -> None:
    said("promote", str(run_dir), "9", "--reason", "better")
    done = told("rollback", str(run_dir), "--reason", "worse")
    assert (done["withdrawn"]["version"], done["withdrawn"]["status"]) == (9, "rolled_back")
    active = done["active"]
    assert (active["parent"], active["origin"], done["awaits_number"]) == (3, "rollback", False)
    assert active["version"] > 2**20
    assert read_kept(run_dir, active["version"], active["sha256"]) == BLOBS[3]


def test_a_living_learner_chooses_the_number_of_a_rollback(run_dir: Path) -> None:
    said("promote", str(run_dir), "9", "--reason", "better")
    learner = hold(run_dir)
    assert learner is not None
    with learner:
        done = told("rollback", str(run_dir), "--reason", "worse")
    assert (done["active"]["version"], done["awaits_number"]) == (3, True)
    with Registry.open(registry_url(run_dir)) as registry:
        awaiting = registry.awaiting_number("default")
    assert awaiting is not None
    assert awaiting.version == 3


def test_a_canary_that_is_rolled_back_leaves_the_active_version_its_number(run_dir: Path) -> None:
    said("promote", str(run_dir), "5", "--to", "canary", "--canary-share", "0.1", "--reason", "try")
    done = told("rollback", str(run_dir), "--reason", "worse")
    assert (done["withdrawn"]["version"], done["active"]["version"], done["awaits_number"]) == (5, 3, False)


def test_traffic_is_changed_field_by_field(run_dir: Path) -> None:
    said(
        "traffic", str(run_dir), "--latest-share", "0.5", "--pin", "robot=5", "--shadow", "9", "--reason", "a"
    )
    changed = told("traffic", str(run_dir), "--experiment", "second", "--reason", "b")
    assert (changed["latest_share"], changed["pins"], changed["shadow"]) == (0.5, {"robot": 5}, 9)
    changed = told("traffic", str(run_dir), "--unpin", "robot", "--shadow", "0", "--reason", "c")
    assert (changed["pins"], changed["shadow"], changed["experiment"]) == ({}, None, "second")


def test_weights_of_a_retired_version_leave_the_folder(run_dir: Path) -> None:
    assert told("retire", str(run_dir), "9", "--reason", "old")["status"] == "retired"
    assert kept_files(run_dir) == {3, 5}
    learner = hold(run_dir)
    assert learner is not None
    with learner:
        said("retire", str(run_dir), "5", "--reason", "old")
    assert kept_files(run_dir) == {3, 5}


def test_export_writes_the_active_version_or_one_that_is_named(run_dir: Path) -> None:
    said("export", str(run_dir), "--output", str(run_dir / "active.safetensors"))
    assert (run_dir / "active.safetensors").read_bytes() == BLOBS[3]
    said("export", str(run_dir), "9", "-o", str(run_dir / "nine.safetensors"))
    assert (run_dir / "nine.safetensors").read_bytes() == BLOBS[9]


def test_an_exported_model_is_the_version_that_was_named(run_dir: Path) -> None:
    why = "the extra `onnx` is not installed"
    pytest.importorskip("onnxscript", reason=why)
    runtime = pytest.importorskip("onnxruntime", reason=why)
    said("export", str(run_dir), "5", "--format", "onnx", "-o", str(run_dir / "five.onnx"))
    session = runtime.InferenceSession(str(run_dir / "five.onnx"))
    told = session.get_modelmeta().custom_metadata_map
    assert (told["run"], told["version"], told["sha256"]) == (RUN, "5", weights.sha256(BLOBS[5]))
    observed = {"observation": np.full((2, 3), 0.5, np.float32)}
    parameters, value = session.run(["parameters", "value"], observed)
    policy = build(OBSERVATION, Discrete(2), PolicySection(), seed=5)
    np.testing.assert_allclose(parameters, policy.step(observed).parameters, rtol=0, atol=1e-5)
    np.testing.assert_allclose(value, policy.values(observed), rtol=0, atol=1e-5)


def test_a_runs_network_is_imported_only_where_the_user_allows(run_dir: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    network = PolicySection(network="tests.support.experience.own_networks:Good")
    write_specification(run_dir, replace(specification(), policy_json=network.canonical_json()))
    arguments = ("export", str(run_dir), "5", "--format", "onnx", "-o", str(run_dir / "five.onnx"))
    assert "actor.allow_modules" in said(*arguments, code=2)
    (run_dir / "config.toml").write_text(
        '[actor]\nallow_modules = ["tests.support.experience.own_networks"]\n'
    )
    assert "was not made here, and names modules" in said(*arguments, code=2)
    # Now it is made, and the weights of another network do not fit it.
    assert "is it the same policy?" in said(*arguments, "--trust", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("promote", "RUN", "4", "--reason", "x"), "version=4 of policy='default' is not registered"),
        (("promote", "RUN", "5", "--to", "king", "--reason", "x"), "'king' is not one of 'active', 'canary'"),
        (("promote", "RUN", "5", "--to", "canary", "--reason", "x"), "give its share of the clients"),
        (
            ("promote", "RUN", "5", "--to", "canary", "--canary-share", "0.9", "--reason", "x"),
            "leaves too few clients of the active version",
        ),
        (
            ("promote", "RUN", "5", "--to", "canary", "--canary-share", "0", "--reason", "x"),
            "give its share of the clients",
        ),
        (("promote", "RUN", "5", "--reason", " "), "say in 1 to 1024 characters"),
        (("rollback", "RUN", "--reason", "x"), "keeps no version from before version=3"),
        (("retire", "RUN", "3", "--reason", "x"), "is active: promote another version first"),
        (("traffic", "RUN", "--canary-share", "0.1", "--reason", "x"), "has no canary"),
        (("traffic", "RUN", "--canary-share", "2", "--reason", "x"), "must be between 0 and 1"),
        (("traffic", "RUN", "--pin", "robot", "--reason", "x"), "write CLIENT=VERSION"),
        (("export", "RUN", "4", "-o", "never"), "is not registered"),
        (
            ("export", "RUN", "--format", "pickle", "-o", "never"),
            "'pickle' is not one of 'safetensors', 'onnx'",
        ),
        (("list", "/nowhere/at/all"), "no such folder"),
        (("list", "mysql://there/x"), "use sqlite:///FILE or postgresql://"),
    ],
)
def test_a_refused_command_ends_with_2_and_the_cause(
    run_dir: Path, arguments: tuple[str, ...], words: str
) -> None:
    with Registry.open(registry_url(run_dir)) as registry:
        before = registry.list("default"), registry.traffic("default")
        output = said(*(str(run_dir) if word == "RUN" else word for word in arguments), code=2)
        assert words in " ".join(output.split())
        assert (registry.list("default"), registry.traffic("default")) == before


def test_a_run_without_versions_reports_it(tmp_path: Path) -> None:
    assert "no version is registered yet" in said("list", str(tmp_path), code=2)
    assert list(tmp_path.iterdir()) == []


def test_only_one_version_is_active_after_every_command(run_dir: Path) -> None:
    for version in ("5", "9"):
        said("promote", str(run_dir), version, "--reason", "x")
    said("rollback", str(run_dir), "--reason", "x")
    with Registry.open(registry_url(run_dir)) as registry:
        assert len(registry.list("default", Status.ACTIVE)) == 1


def test_a_reason_of_several_lines_is_shown_in_one(run_dir: Path) -> None:
    said("promote", str(run_dir), "5", "--reason", "größer\n2026-01-01  promoted  learner  better\x1b[2J")
    shown = said("show", str(run_dir), "5").splitlines()
    assert not any(line.startswith("2026-01-01") for line in shown)
    assert shown[-1].endswith(r"größer\n2026-01-01  promoted  learner  better\x1b[2J")


def evaluated(*assignments: str) -> Any:
    words = [word for one in assignments for word in ("--set", one)]
    return CliRunner().invoke(app, ["evaluate", str(SOLVED_RUN), "--episodes", "2", "--json", *words])


def test_an_evaluation_is_played_as_it_is_set() -> None:
    cut = evaluated("evaluation.max_episode_steps=3", "evaluation.seed=8")
    assert (json.loads(cut.stdout)["mean"], json.loads(cut.stdout)["seed"]) == (3.0, 8)
    limited = evaluated("environment.max_episode_steps=5", "evaluation.environments=1")
    assert json.loads(limited.stdout)["mean"] == 5.0
    wrong = evaluated("environment.kwargs.gravity=1")
    assert wrong.exit_code == 2
    assert "gravity" in wrong.stderr


@pytest.mark.parametrize(
    "assignment",
    [
        "algorithm.discount=0.5",
        "policy.hidden_sizes=[7]",
        "evaluation.deterministic=false",
        "learner.total_steps=1",
    ],
)
def test_what_an_evaluation_does_not_use_is_refused(assignment: str) -> None:
    refused = evaluated(assignment)
    assert (refused.exit_code, refused.stderr.startswith(assignment)) == (2, True), refused.stderr
