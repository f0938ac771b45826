"""python -m tests.deploy.prometheus.record_autoscaling.

The series of a starved and of a saturated learner, for promtool.

A real Prometheus watches two real runs, each for less than a minute. The command writes
deploy/prometheus/autoscaling_test.yml, in which promtool asks the recording rules which way to scale the
actors.
"""

import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.deploy.prometheus.prometheus_server import RULES, WatchingPrometheus, watching
from tests.support.run.harness import Training, wait_until_gone

SECONDS: Final = 45
STEP_S: Final = 5
LONG: Final = ("CartPole-v1", "--total-steps=100000000", "--set=learner.stop_at_target=false")
RUNS: Final = {
    # One worker with one environment, and a learner that looks at each batch once.
    "starved": (
        "--actors=1", "--set=environment.count=1",
        "--set=algorithm.epochs=1", "--set=algorithm.minibatches=1",
    ),
    # Two workers with eight each, and a learner that looks at each batch sixty times.
    "saturated": ("--actors=2", "--set=algorithm.epochs=60"),
}  # fmt: skip
SERIES: Final = (
    "penstock_learner_wait_seconds_total", "penstock_actor_wait_seconds_total",
    'penstock_cpu_seconds_total{role="actor"}', "penstock_outstanding_steps", "penstock_budget_steps",
)  # fmt: skip
LABELS: Final = ("instance", "role", "cause")
ASKED: Final = {
    "penstock:learner_wait_share > bool penstock:actor_wait_share": {"starved": 1, "saturated": 0},
    "penstock:outstanding_share": {"starved": 1, "saturated": 1},
    "penstock:actors_wanted > bool on (run) (1.1 * penstock:actors)": {"starved": 1, "saturated": 0},
    "penstock:actors_wanted < bool on (run) (0.9 * penstock:actors)": {"starved": 0, "saturated": 1},
}
HEAD: Final = """\
# Recorded by `python -m tests.deploy.prometheus.record_autoscaling` from two real runs: one whose learner
# starves, one whose learner is saturated. The rules must scale actors up for the one and down for the other.
rule_files: [rules.yml]
evaluation_interval: 5s
tests:
  - name: actors are scaled up for a starved learner and down for a saturated one
    interval: 5s
    input_series:
"""


def recorded(name: str, folder: Path) -> Iterator[str]:
    training = Training(folder / name, *LONG, *RUNS[name])
    try:
        training.until_steps(4096)
        with watching(folder / f"{name}-prometheus", folder / name / "targets.json") as prometheus:
            prometheus.until(lambda: bool(prometheus.query("penstock:actors_wanted")), "the rules")
            began_s = time.time()
            threading.Event().wait(SECONDS)
            yield from _lines(name, prometheus, began_s)
    finally:
        training.process.terminate()
        training.process.communicate()
        wait_until_gone(training)


def _lines(name: str, prometheus: WatchingPrometheus, began_s: float) -> Iterator[str]:
    moments = [began_s + step * STEP_S for step in range(SECONDS // STEP_S)]
    for asked in SERIES:
        for series in prometheus.query_range(asked, moments[0], moments[-1], STEP_S):
            labels = {"run": name} | {key: series["metric"][key] for key in LABELS if key in series["metric"]}
            told = {float(at): text for at, text in series["values"]}
            values = " ".join(_short(told, moment) for moment in moments)
            words = ", ".join(f'{key}="{value}"' for key, value in labels.items())
            yield f"      - {{series: '{series['metric']['__name__']}{{{words}}}', values: '{values}'}}\n"


def _short(told: dict[float, str], moment: float) -> str:
    near = [text for at, text in told.items() if abs(at - moment) < STEP_S / 2]
    return f"{float(near[0]):.6g}" if near else "_"


def _questions() -> Iterator[str]:
    yield "    promql_expr_test:\n"
    for expression, answers in ASKED.items():
        yield f"      - expr: '{expression}'\n        eval_time: {SECONDS - STEP_S}s\n        exp_samples:\n"
        for run, value in answers.items():
            name = "" if " " in expression else expression
            yield f"""          - {{labels: '{name}{{run="{run}"}}', value: {value}}}\n"""


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="ps-", dir="/tmp") as folder:
        lines = [line for name in RUNS for line in recorded(name, Path(folder))]
    (RULES / "autoscaling_test.yml").write_text(HEAD + "".join([*lines, *_questions()]))


if __name__ == "__main__":
    main()
