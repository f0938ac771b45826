"""Templates of jobs for tests.

A task of two arms that is learned in a moment, the smallest training from feedback, and what goes wrong.
"""

from pathlib import Path
from typing import Final

QUICK: Final = """
run = "quick"

[template]
title = "CartPole, a moment"

[template.numbers.maxSteps]
settings = {"learner.total_steps" = 512}
least = 1
most = 100_000
default = 2
whole = true

[template.numbers.learningRate]
settings = {"algorithm.learning_rate" = 1}
least = 1e-6
most = 1e-2
default = 3e-4

[environment]
id = "CartPole-v1"
count = 4

[actor]
count = 1
unroll_length = 64

[algorithm]
batch_steps = 512

[learner]
keep_every_updates = 5
stop_at_target = false # what is long is not over because it was learned

[evaluation]
episodes = 2
"""
TINY: Final = """
workload = "rlhf"
run = "tiny"

[template]
title = "A policy from feedback, in a moment"
kind = "rlhf"

[template.numbers.maxSteps]
settings = {"learner.total_updates" = 1, "learner.total_steps" = 252}
least = 1
most = 1000
default = 6
whole = true

[template.numbers.learningRate]
settings = {"algorithm.learning_rate" = 1}
least = 1e-8
most = 1e-2
default = 2e-3

[environment]
id = "feedback"
count = 4

[environment.kwargs]
task = "words"
serve_reward = true
reward_reads = "tokens"
response_tokens = 4
held_out = 0.2

[environment.kwargs.reward_training]
epochs = 1
batch = 16
learning_rate = 3e-3

[policy.kwargs]
rank = 2
alpha = 4.0

[actor]
count = 1
unroll_length = 63

[algorithm]
name = "token_ppo"
batch_steps = 252
kl_coefficient = 0.05
critic_learning_rate = 2e-3

[learner]
keep_every_updates = 2

[evaluation]
episodes = 4
"""
WRONG: Final = """
[environment]
id = "No-such-environment-v0"
"""


def write_templates(folder: Path) -> Path:
    """Write them; returns the folder."""
    folder.mkdir()
    (folder / "quick.toml").write_text(QUICK)
    (folder / "wrong.toml").write_text(WRONG)
    return folder


def write_tiny(folder: Path, name: str = "rlhf") -> Path:
    """Write the smallest training from feedback under a name; returns the folder."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.toml").write_text(TINY)
    return folder
