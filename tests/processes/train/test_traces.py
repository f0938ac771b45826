"""A real run with tracing and JSON logs: one fragment followed through all processes, every log line read."""

import json
import re
from pathlib import Path

import pytest

from tests.support.run.training import Training

pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

from tests.support.observers.trace_receiver import Received, Receiver, receiver

TEXT_LINE = re.compile(r"\d{4}-\d\d-\d\dT")
WAY = {
    "actor.unroll": "penstock-actor",
    "actor.append": "penstock-actor",
    "broker.append": "penstock-broker",
    "broker.check": "penstock-broker",
    "broker.store": "penstock-broker",
    "learner.batch": "penstock-learner",
}
PARENTS = {
    "actor.append": "actor.unroll",
    "broker.append": "actor.unroll",
    "broker.check": "broker.append",
    "broker.store": "broker.append",
    "learner.batch": "actor.unroll",
}


def test_a_fragment_is_followed_from_its_steps_to_the_weights_that_it_made(tmp_path: Path) -> None:
    """By its trace through actor, broker and learner; by a link on to update, publication and the actors."""
    with receiver() as traces:
        training = Training(
            tmp_path / "run", "CartPole-v1", "--total-steps", "6000", "--json",
            "--set", "evaluation.episodes=4",
            "--set", "tracing.exporter=otlp", "--set", f"tracing.endpoint={traces.url}",
            "--set", "tracing.sample_ratio=1.0", "--set", "logs.format=json",
        )  # fmt: skip
        code, _, err = training.end()
    assert code == 0, err
    run = training.summary()["run"]
    applied = {span.attributes["penstock.version"] for span in traces.named("actor.apply")}
    made = [
        span for span in traces.named("learner.publish") if span.attributes["penstock.version"] in applied
    ]
    assert made, "no version that came of a traced update was applied by an actor"
    for publication in made:
        check_the_way(traces, publication, run)
    check_logs(training.run_dir / "logs", run)


def check_the_way(traces: Receiver, publication: Received, run: str) -> None:
    """Back from a publication to the fragments of its update."""
    (update,) = [span for span in traces.named("learner.update") if span.span == publication.parent]
    assert update.trace == publication.trace
    assert len(update.links) == update.attributes["penstock.fragments"]
    for trace, span in update.links:
        way = traces.of_trace(trace)
        assert {name: way[name][0].service for name in way if name != "actor.apply"} == WAY
        (unroll,), (batch,) = way["actor.unroll"], way["learner.batch"]
        assert (unroll.parent, batch.span) == ("", span)
        assert unroll.attributes["penstock.run"] == run
        for name, parent in PARENTS.items():
            assert {one.parent for one in way[name]} <= {one.span for one in way[parent]}, name
        taken = [one for one in way["broker.append"] if one.attributes["penstock.taken"]]
        assert taken
        for one in (*taken, *way["actor.append"]):
            for key in ("penstock.session", "penstock.sequence"):
                assert one.attributes[key] == unroll.attributes[key]


def check_logs(folder: Path, run: str) -> None:
    """Every line that a process of ours logged is an object that names role and run.

    Libraries write their own.
    """
    for role in ("actor", "broker", "learner", "launcher", "evaluator"):
        (file, *_) = sorted(folder.glob(f"{role}*.log"))
        text = file.read_text().splitlines()
        assert [line for line in text if TEXT_LINE.match(line)] == []
        lines = [json.loads(line) for line in text if line.startswith("{")]
        assert {(line["role"], line["run"]) for line in lines} == {(role, run)}
