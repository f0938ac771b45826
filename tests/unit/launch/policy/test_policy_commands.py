"""`penstock policy` on a real registry of a run that is over."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

from penstock.config.settings import PolicySection
from penstock.launch.cli.app import app
from penstock.learner.publish.kept_versions import write_specification
from penstock.policy import weights
from penstock.policy.policy import build
from penstock.protocol.spaces import Discrete
from penstock.registry.records import Evaluation, NewVersion, Origin, Status
from penstock.registry.registry import Registry
from penstock.registry.weight_files import hold, kept_files, read_kept, registry_url, write_kept
from tests.support.run.small_run import OBSERVATION, RUN, specification
from tests.support.storage.ready_tables import with_registry

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


def test_show_tells_what_was_decided_and_whether_the_weights_are_whole(run_dir: Path) -> None:
    shown = told("show", str(run_dir), "3")
    assert shown["weights"] == "held, undamaged"
    assert [event["action"] for event in shown["events"]] == ["registered", "promoted"]
    (run_dir / "policies" / "3.safetensors").write_bytes(b"x")
    assert "damaged" in said("show", str(run_dir), "3")


def test_promote_moves_the_arm_and_names_who_did_it(run_dir: Path) -> None:
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


def test_while_a_learner_lives_it_draws_the_number(run_dir: Path) -> None:
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


def test_what_is_retired_leaves_the_folder(run_dir: Path) -> None:
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


def test_a_network_of_the_runs_is_imported_only_where_its_user_allows(run_dir: Path) -> None:
    pytest.importorskip("onnxscript", reason="the extra `onnx` is not installed")
    network = PolicySection(network="tests.unit.penstock.policy.own_networks:Good")
    write_specification(run_dir, replace(specification(), policy_json=network.canonical_json()))
    arguments = ("export", str(run_dir), "5", "--format", "onnx", "-o", str(run_dir / "five.onnx"))
    assert "actor.allow_modules" in said(*arguments, code=2)
    (run_dir / "config.toml").write_text(
        '[actor]\nallow_modules = ["tests.unit.penstock.policy.own_networks"]\n'
    )
    assert "was not made here, and names modules" in said(*arguments, code=2)
    # Now it is made, and the weights of another network do not fit it.
    assert "is it the same policy?" in said(*arguments, "--trust", code=2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("promote", "RUN", "4", "--reason", "x"), "version=4 of policy='default' is not registered"),
        (("promote", "RUN", "5", "--to", "king", "--reason", "x"), "'king' is not one of 'active', 'canary'"),
        (("promote", "RUN", "5", "--to", "canary", "--reason", "x"), "name the share of those that do"),
        (
            ("promote", "RUN", "5", "--to", "canary", "--canary-share", "0.9", "--reason", "x"),
            "leaves too few clients of the active version",
        ),
        (
            ("promote", "RUN", "5", "--to", "canary", "--canary-share", "0", "--reason", "x"),
            "name the share of those that do",
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
def test_what_is_refused_ends_with_2_and_says_why(
    run_dir: Path, arguments: tuple[str, ...], words: str
) -> None:
    with Registry.open(registry_url(run_dir)) as registry:
        before = registry.list("default"), registry.traffic("default")
        output = said(*(str(run_dir) if word == "RUN" else word for word in arguments), code=2)
        assert words in " ".join(output.split())
        assert (registry.list("default"), registry.traffic("default")) == before


def test_a_run_that_has_registered_nothing_says_so(tmp_path: Path) -> None:
    assert "no version is registered yet" in said("list", str(tmp_path), code=2)
    assert list(tmp_path.iterdir()) == []


def test_only_one_version_is_active_after_all_this(run_dir: Path) -> None:
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
