"""A process that acts with a small network loads no torch: that is most of its start and of its memory."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Final

from penstock.config.settings import EnvironmentSection, PolicySection
from penstock.policy import weights
from penstock.policy.policy import build
from penstock.workloads.control.environment import spaces
from tests.support.run import small_run

EVALUATES: Final = """
import sys, threading
from pathlib import Path
sys.modules["torch"] = None  # to import it is an error
import penstock.actor.process
from penstock.config.settings import Settings
from penstock.runtime.health import Health
from penstock.protocol.specification import RunSpecification
from penstock.workloads.plugin.acting import make_step_generator, make_step_runner
folder, settings = Path(sys.argv[1]), Settings()
specification = RunSpecification.decode((folder / "specification").read_bytes())
make_step_generator(specification, settings, Health("actor")).close()
runner = make_step_runner(specification, settings, 3)
runner.local.policy.load((folder / "weights").read_bytes())
played = runner.play(episodes=3, seed=0, deterministic=False, stop=threading.Event())
print(*(one.length for one in played))
"""


def test_rollouts_and_evaluations_of_a_small_network_load_no_torch(tmp_path: Path) -> None:
    observation, action = spaces(EnvironmentSection())
    run = replace(small_run.specification(), observation_space=observation, action_space=action)
    (tmp_path / "specification").write_bytes(run.encode())
    policy = build(observation, action, PolicySection.model_validate_json(run.policy_json), 0)
    (tmp_path / "weights").write_bytes(weights.encode(policy))
    done = subprocess.run(
        [sys.executable, "-c", EVALUATES, str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(int(length) > 1 for length in done.stdout.split())
