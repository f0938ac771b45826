"""The dashboard of learning: returns, losses, versions."""

from collections.abc import Sequence
from typing import Final

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import Panel, above, below, dashboard, lines, number
from deploy.grafana.promql import mean, quantile, rate

BOARD: Final = "training"

_NOW: Final[Sequence[Panel]] = [
    number("Return", "Mean return of the last 100 training episodes.", "none", below(0, "blue"),
           ("penstock_mean_return{RUN}", "{{run}}")),
    number("Evaluated", "Mean return of the last evaluation: fixed seeds; deterministic actions unless said.",
           "none", below(0, "blue"),
           ("penstock_evaluation_return{RUN}", "{{actions}} {{run}}")),
    number("Steps a second", "Valid environment steps trained on.", "suffix: steps/s", below(1),
           (rate("penstock_trained_steps_total"), "{{run}}")),
    number("Updates", "Updates that this learner process has made.", "none", below(1),
           ("sum by (run) (penstock_updates_total{RUN})", "{{run}}")),
    number("Version", "Newest version of the weights that was published.", "none", below(1),
           ("max by (run) (penstock_weight_version_published{RUN})", "{{run}}")),
    number("Versions kept", "Versions of this run that the registry keeps.", "none", above(17),
           ("max by (run) (penstock_versions_kept{RUN})", "{{run}}")),
]  # fmt: skip

_LEARNING: Final[Sequence[Panel]] = [
    lines("Return",
          "Training: mean of the last 100 episodes, with exploration. Evaluation: fixed seeds, without.",
          "none", below(0, "blue"),
          ("penstock_mean_return{RUN}", "training {{run}}"),
          ("penstock_evaluation_return{RUN}", "evaluation, {{actions}} {{run}}"), wide=2),
    lines("Length of episodes", "Mean of the episodes that rollout workers and clients finished.",
          "suffix: steps", below(1),
          (mean("penstock_episode_length_steps"), "mean {{run}}"),
          (quantile(0.9, "penstock_episode_length_steps"), "p90 {{run}}")),
    lines("Policy loss", "Surrogate loss of the last update. Its size means little; jumps do.", "none",
          above(1),
          ("penstock_policy_loss{RUN}", "{{run}}")),
    lines("Value loss", "Rises with the returns at first; when it stays high the critic does not follow.",
          "none", above(1000),
          ("penstock_value_loss{RUN}", "{{run}}")),
    lines("Explained variance",
          "Share of the variance of the value targets that the critic explains. Below 0 it is worse than a "
          "constant.",
          "percentunit", below(0), ("penstock_explained_variance_ratio{RUN}", "{{run}}")),
    lines("KL", "KL(μ‖π): how far the policy is from the one that acted, after the update.", "suffix: nats",
          above(0.05, 0.2),
          ("penstock_kl_behaviour_nats{RUN}", "{{run}}")),
    lines("Entropy", "Of the policy. At 0 it explores no longer.", "suffix: nats", below(0.05, "orange"),
          ("penstock_entropy_nats{RUN}", "{{run}}")),
    lines("Clip fraction",
          "Share of ratios outside the clip range. High: too large steps, or experience that is too old.",
          "percentunit", above(0.3, 0.5), ("penstock_clip_ratio{RUN}", "{{run}}")),
    lines("Effective sample size", "By batch size: what the behaviour weights leave of a batch.",
          "percentunit", below(0.5, "orange"),
          ("penstock_effective_sample_ratio{RUN}", "{{run}}")),
    lines("Gradient norm", "Before it is clipped (algorithm.max_gradient_norm).", "none", above(10, 100),
          ("penstock_gradient_norm{RUN}", "{{run}}")),
    lines("Learning rate",
          "Step size of the last update, as its schedule gives it. 0: nothing is learned any more.", "sci",
          below(1e-9),
          ("penstock_learning_rate{RUN}", "{{run}}")),
]  # fmt: skip

_PACE: Final[Sequence[Panel]] = [
    lines("Versions", "Published by the learner, handed out by brokers, applied by the slowest actor.",
          "none", below(1),
          ("max by (run) (penstock_weight_version_published{RUN})", "published {{run}}"),
          ("max by (run) (penstock_weight_version_served{RUN})", "handed out {{run}}"),
          ("min by (run) (penstock_weight_version_applied{RUN} > 0)", "applied by the slowest {{run}}")),
    lines("Updates", "Made, and batches that changed nothing, by reason.", "suffix: updates/s", below(0.001),
          (rate("penstock_updates_total"), "made {{run}}"),
          (rate("penstock_updates_skipped_total", "run, reason"), "skipped: {{reason}} {{run}}")),
    lines("Where the learner's time goes",
          "Share of its time in each part of an update. Assembling and publishing have threads of their own.",
          "percentunit", above(1),
          (rate("penstock_update_seconds_sum", "run, phase"), "{{phase}} {{run}}")),
    lines("Checkpoints", "Mean time to write and commit one.", "s", above(5, 30),
          (mean("penstock_checkpoint_seconds"), "{{run}}")),
    lines("Episodes", "Finished, by rollout workers and clients (training) and by evaluation actors.",
          "suffix: episodes/s", below(0.001),
          (rate("penstock_episodes_total", "run, evaluation"), "evaluation: {{evaluation}} {{run}}")),
]  # fmt: skip


def board() -> Dashboard:
    """Return the dashboard."""
    text = "Return, losses and the figures by which one sees how PPO does."
    return dashboard(BOARD, "Training", text, {"Now": _NOW, "Learning": _LEARNING, "Pace": _PACE})
