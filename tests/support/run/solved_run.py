"""A run of CartPole-v1 that has ended, as a folder to copy: solved by version 22, which its registry holds.

Its Redis, logs and addresses are left out. Where the program reads it no longer, make it anew:

    penstock train CartPole-v1 --run-dir DIR --seed 3 --serve 127.0.0.1:0 --total-steps 20000
        --set evaluation.episodes=5 --set policy.hidden_sizes=[16,16] --set canary.slow_ms=80.0
        --set serving.max_episodes=500
"""

from pathlib import Path
from typing import Final

SOLVED_RUN: Final = Path("tests/processes/train/solved_run").absolute()
