"""Templates of jobs for tests: a task of two arms that is learned in a moment, and what goes wrong."""

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
