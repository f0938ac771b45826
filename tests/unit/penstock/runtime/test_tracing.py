"""What is recorded, what is not, and that nothing is there while tracing is off."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.config.settings import ConfigurationError, Settings, load
from penstock.runtime import tracing
from penstock.wire.traceparent import TraceParent, read_traceparent
from tests.support.run.forked_process import ForkedProcess

RUN = "run-a"
Begin = Callable[..., Callable[[], list[dict[str, Any]]]]

OFF = """
import sys
import {modules}
from penstock.runtime import tracing
from penstock.config.settings import Settings
tracing.start(Settings(), "actor")
with tracing.trace("actor.unroll"):
    assert tracing.current() == tracing.record("actor.append", 1.0, header="x") == ""
assert not tracing.is_on()
print([name for name in sys.modules if name.startswith({prefixes})])
"""


def settings(**section: Any) -> Settings:
    """Of a run with this section `tracing`."""
    return load([{"run": RUN, "tracing": section}])


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Starts tracing into a file; what it returns ends it and reads the spans."""
    pytest.importorskip("opentelemetry.sdk", reason="the extra `tracing` is not installed")

    def started(ratio: float = 1.0) -> Callable[[], list[dict[str, Any]]]:
        tracing.start(settings(exporter="file", folder=str(tmp_path), sample_ratio=ratio), "actor")
        return ended

    def ended() -> list[dict[str, Any]]:
        tracing.end()
        return [json.loads(line) for file in tmp_path.iterdir() for line in file.read_text().splitlines()]

    yield started
    tracing.end()


def parent_of(number: int, *, sampled: bool = True) -> str:
    """A context from elsewhere whose trace a ratio of 0.5 takes below 2^63 only."""
    return str(TraceParent(number, 1, sampled))


@pytest.mark.parametrize(
    ("modules", "prefixes"),
    [
        ("actor.process, actor.serving.server_process", ("opentelemetry",)),
        # The Redis client loads its own part of OpenTelemetry, metrics, wherever that is installed.
        (
            "broker.service.process, learner.process.entry",
            ("opentelemetry.sdk.trace", "opentelemetry.exporter", "opentelemetry.proto"),
        ),
    ],
)
def test_off_nothing_of_it_is_loaded(modules: str, prefixes: tuple[str, ...], tmp_path: Path) -> None:
    """In a process of any role."""
    code = OFF.format(modules=modules, prefixes=prefixes)
    said = tmp_path / "said.txt"
    assert ForkedProcess(code, output=said).wait(120) == 0, said.read_text()
    assert said.read_text().strip() == "[]"


def test_off_a_block_is_the_same_object_each_time() -> None:
    """No fragment makes one."""
    assert tracing.trace("actor.unroll") is tracing.trace("actor.unroll")


def test_a_block_is_a_trace_and_its_context_goes_into_the_header(begin: Begin) -> None:
    """What is recorded with that header is a child, with its duration and attributes."""
    spans = begin()
    with tracing.trace("actor.unroll"):
        header = tracing.current()
        tracing.describe(session=3)
        tracing.record("actor.apply", 0.5, parent=header, version=7)
    assert tracing.current() == ""
    assert tracing.record("actor.append", 0.25, header=header, acked=True)
    apply, unroll, append = spans()
    read = read_traceparent(header)
    assert {span["context"]["trace_id"] for span in (apply, unroll, append)} == {f"0x{read.trace_id:032x}"}
    assert unroll["parent_id"] is None
    assert (
        unroll["context"]["span_id"] == apply["parent_id"] == append["parent_id"] == f"0x{read.span_id:016x}"
    )
    assert unroll["attributes"] == {"penstock.session": 3}
    assert append["attributes"] == {"penstock.acked": True}
    assert apply["resource"]["attributes"]["service.name"] == "penstock-actor"
    assert apply["resource"]["attributes"]["penstock.run"] == RUN


def test_a_trace_is_not_begun_inside_another(begin: Begin) -> None:
    """Two unrolls of one thread are two fragments."""
    spans = begin()
    with tracing.trace("a"), tracing.trace("b"):
        pass
    assert [span["parent_id"] for span in spans()] == [None, None]


@pytest.mark.parametrize("ratio", [0.0, 1.0])
def test_the_ratio_decides_at_the_first_step(begin: Begin, ratio: float) -> None:
    """What is not sampled has no context, so no process downstream does anything."""
    spans = begin(ratio)
    with tracing.trace("actor.unroll"):
        assert bool(tracing.current()) is bool(ratio)
    assert len(spans()) == int(ratio)


def test_a_header_is_recorded_where_its_flag_and_the_own_ratio_agree(begin: Begin) -> None:
    """Who sets the flag on everything makes no process record more than its ratio."""
    spans = begin(0.5)
    assert tracing.record("broker.append", 0.1, header=parent_of(5))
    assert tracing.record("broker.append", 0.1, header=parent_of(2**63 + 5)) == ""
    assert tracing.record("broker.append", 0.1, header=parent_of(5, sampled=False)) == ""
    assert len(spans()) == 1


def test_what_belongs_to_nothing_is_not_recorded(begin: Begin) -> None:
    """A fragment that was not sampled leads to no parts of it."""
    spans = begin()
    assert tracing.record("broker.check", 0.1, parent="") == ""
    assert spans() == []


def test_an_update_links_to_its_fragments_and_is_always_recorded(begin: Begin) -> None:
    """At any ratio, and so is what follows from it: the links are to what was sampled."""
    spans = begin(1e-6)
    batch = tracing.record("learner.batch", 0.1, header=parent_of(5))
    update = tracing.record("learner.update", 0.1, links=(batch,), update=4)
    assert tracing.record("learner.publish", 0.1, parent=update, version=5)
    _, one, publication = spans()
    assert one["parent_id"] is None
    assert [link["context"]["trace_id"] for link in one["links"]] == [f"0x{5:032x}"]
    assert publication["parent_id"] == one["context"]["span_id"]


def test_after_the_end_nothing_is_recorded(begin: Begin) -> None:
    """A thread that is late is told so."""
    begin()()
    assert not tracing.is_on()
    assert tracing.record("actor.append", 0.1, header=parent_of(5)) == ""


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no folder": ({"exporter": "file"}, r"tracing\.folder: name the folder"),
    "plaintext": (
        {"exporter": "otlp", "endpoint": "http://collector:4318/v1/traces"},
        r"tracing\.endpoint='http://collector.*plaintext beyond loopback; use https",
    ),
}


@pytest.mark.parametrize(("section", "message"), MISTAKES.values(), ids=MISTAKES.keys())
def test_what_cannot_be_used_is_refused_with_the_remedy(section: dict[str, Any], message: str) -> None:
    """Before anything is recorded."""
    with pytest.raises(ConfigurationError, match=message):
        tracing.start(settings(**section), "actor")
    assert not tracing.is_on()


WITHOUT = """
import sys
sys.modules["opentelemetry"] = None
from penstock.runtime import tracing
from penstock.config.settings import load
tracing.start(load([{"tracing": {"exporter": "otlp"}}]), "actor")
"""


def test_without_the_extra_it_is_said_how_to_get_it() -> None:
    """One line, not a traceback into a library."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], capture_output=True, text=True, check=False, timeout=60
    )
    last = done.stderr.splitlines()[-1]
    assert (
        "tracing.exporter='otlp': opentelemetry is not installed; `pip install '.[tracing]'` in a checkout"
        in last
    )
