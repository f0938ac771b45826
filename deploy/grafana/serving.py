"""The dashboard of the policy server, as its clients see it."""

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import Panel, Query, above, below, dashboard, heat, lines, number
from deploy.grafana.promql import mean, quantile, rate

BOARD: Final = "serving"


_SHED: Final = rate("penstock_refusals_total", matcher='reason=~"overloaded|deadline"')
_REFUSED: Final = 'reason=~"overloaded|deadline|unknown_version|episode_unknown|episode_elsewhere"'
_STOOD_IN: Final = rate("penstock_policy_answers_total", matcher='fallback!="none"')


def _quantile(share: float, histogram: str, legend: str) -> Query:
    return quantile(share, histogram), f"{legend} {{{{run}}}}"


_NOW: Final[Sequence[Panel]] = [
    number("Answers", "Actions answered, all servers together.", "suffix: /s", below(0.001, "blue"),
           (rate("penstock_policy_answers_total"), "{{run}}")),
    number("p99", "From request to answer in the server; one in a hundred takes longer.", "s",
           above(0.02, 0.1),
           _quantile(0.99, "penstock_policy_answer_seconds", "p99")),
    number("Shed", "Share of the calls that were refused because there was no time for them.", "percentunit",
           above(0.001, 0.05),
           (f"{_SHED} / {rate('penstock_policy_calls_total')}", "{{run}}")),
    number("Fallbacks", "Share of the answers for which another than the client's version stood in.",
           "percentunit", above(0.001, 0.05),
           (f"{_STOOD_IN} / {rate('penstock_policy_answers_total')}", "{{run}}")),
    number("Episodes", "Episodes of clients that are open.", "none", above(8000, 10_000),
           ("sum by (run) (penstock_policy_episodes_open{RUN})", "{{run}}")),
    number("Canaries withdrawn", "Found worse than the active version, since the servers started.", "none",
           above(1),
           ("sum by (run) (penstock_canaries_withdrawn_total{RUN})", "{{run}}")),
]  # fmt: skip

_CALLS: Final[Sequence[Panel]] = [
    lines("Calls", "Of clients, by RPC.", "suffix: /s", below(0.001, "blue"),
          ("sum by (run, call) (rate(penstock_policy_calls_total{RUN}[WINDOW])) > 0", "{{call}} {{run}}")),
    lines("Time to answer", "From request to answer in the server, the network not included.", "s",
          above(0.02, 0.1),
          _quantile(0.5, "penstock_policy_answer_seconds", "p50"),
          _quantile(0.95, "penstock_policy_answer_seconds", "p95"),
          _quantile(0.99, "penstock_policy_answer_seconds", "p99")),
    lines("Time in the queue",
          "What the first request of a forward pass waited for it: for others to share it, or for the one "
          "before.",
          "s", above(0.01, 0.1), _quantile(0.5, "penstock_policy_queue_seconds", "p50"),
          _quantile(0.99, "penstock_policy_queue_seconds", "p99")),
    lines("Rows of a forward pass", "Observations of several requests that shared it, in the mean.", "none",
          above(256),
          (mean("penstock_policy_batch_rows"), "{{run}}")),
    heat("Forward passes by rows", "How many observations shared a forward pass.", "none", above(256),
         "sum by (le) (increase(penstock_policy_batch_rows_bucket{RUN}[WINDOW]))"),
    lines("Shed and refused", "Calls that were not answered, by reason; the runbook has a row for each.",
          "suffix: /s", above(0.1, 10),
          (rate("penstock_refusals_total", "run, reason", _REFUSED),
           "{{reason}} {{run}}")),
]  # fmt: skip

_ARMS: Final[Sequence[Panel]] = [
    lines("Answers by arm",
          "Which version answered a client: the active one, the canary, the learner's newest, or the one it "
          "is pinned to.",
          "suffix: /s", below(0, "blue"),
          ("sum by (run, arm) (rate(penstock_policy_answers_total{RUN}[WINDOW])) > 0", "{{arm}} {{run}}")),
    lines("Version of each arm", "That it answers with; 0: none.", "none", below(1, "blue"),
          ("max by (run, arm) (penstock_policy_version{RUN})", "{{arm}} {{run}}")),
    lines("Return by arm", "Mean of the clients' episodes that ended.", "none", below(0, "blue"),
          (mean("penstock_policy_episode_return", "run, arm"), "{{arm}} {{run}}")),
    lines("Fallbacks", "Answers for which another stood in, by who it was.", "suffix: /s", above(0.01, 1),
          (rate("penstock_policy_answers_total", "run, fallback", 'fallback!="none"'),
           "{{fallback}} {{run}}")),
    lines("Thoughts by arm", "Before answers of a model that thinks.", "suffix: /s", below(0, "blue"),
          (rate("penstock_text_thought_tokens_count", "run, arm"), "{{arm}} {{run}}")),
    lines("Length of thoughts by arm", "Tokens, in the mean; what they take is in their time.", "none",
          above(256),
          (mean("penstock_text_thought_tokens", "run, arm"), "{{arm}} {{run}}")),
    lines("Time to think by arm", "From the beginning of a thought to its end, in the mean.", "s",
          above(1, 5),
          (mean("penstock_text_thought_seconds", "run, arm"), "{{arm}} {{run}}")),
    lines("Canaries withdrawn", "Found worse than the active version, since the servers started.", "none",
          above(1),
          ("sum by (run) (penstock_canaries_withdrawn_total{RUN})", "{{run}}")),
    lines("Evidence of a verdict", "Of what a verdict about the canary needs, by question; at 1 it is there.",
          "percentunit", above(0.5, 1),
          ("max by (run, cause) (penstock_canary_evidence{RUN})", "{{cause}} {{run}}")),
    lines("Canary not judged", "1: a canary is not judged as it should be, by reason, or is undecided.",
          "none", above(1),
          ("max by (run, reason) (penstock_canary_unguarded{RUN})", "{{reason}} {{run}}"),
          ("max by (run) (penstock_canary_undecided{RUN})", "undecided {{run}}")),
    lines("Cost of the shadow", "Processors that it takes, and answers that it is not asked about.", "none",
          above(0.5, 1),
          (rate("penstock_policy_shadow_seconds_total"), "processors {{run}}"),
          (rate("penstock_policy_shadow_shed_total"), "left out /s {{run}}")),
    lines("Agreement of the shadow", "Mean probability that the shadow gives the action that was answered.",
          "percentunit", below(0.2, "orange"),
          (mean("penstock_policy_shadow_agreement"), "{{run}}")),
]  # fmt: skip

_LEARNING: Final[Sequence[Panel]] = [
    lines("Episodes", "Of clients, open.", "none", above(8000, 10_000),
          ("sum by (run) (penstock_policy_episodes_open{RUN})", "{{run}}")),
    lines("Not learned from", "Steps that were answered and do not go to the learner, by reason.",
          "suffix: steps/s", above(1000),
          (rate("penstock_not_learned_steps_total", "run, reason"), "{{reason}} {{run}}")),
    lines("Late rewards", "Came too late to be learned from and were kept in the feedback table.",
          "suffix: /s", above(1, 100),
          (rate("penstock_feedback_total"), "{{run}}")),
    lines("Event loop",
          "The latest that the event loop of a server or broker came round. Beyond its limits answers are "
          "late.", "s", above(0.05, 0.5),
          ("max by (run, instance) (penstock_loop_lag_worst_seconds{RUN})", "{{instance}} {{run}}")),
]  # fmt: skip


def board() -> Dashboard:
    """Return the dashboard."""
    text = (
        "Rate, latency and batches of the policy server, its versions and arms, what it sheds and what is "
        "learned from clients."
    )
    rows = {"Now": _NOW, "Calls": _CALLS, "Versions and arms": _ARMS, "Learning from clients": _LEARNING}
    return dashboard(BOARD, "Serving", text, rows)
