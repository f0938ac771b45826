"""Metrics of the reward service."""

from typing import Final

from penstock.runtime.metrics import LATENCY_S, declare

ROLE: Final = "reward"
"""Role of the process, under which its metrics are served."""

_families = declare(ROLE)
REWARDS = _families.counter("rewards", "Responses that were scored")
REWARD_VALUE = _families.summary("reward_value", "Scores, as the reward model gives them")
REWARD_BATCH_ROWS = _families.histogram(
    "reward_batch_rows", "Responses that were scored together", (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024)
)
REWARD_PASS_SECONDS = _families.histogram(
    "reward_pass_seconds", "How long it took to score such a batch", LATENCY_S
)
