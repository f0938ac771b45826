"""`penstock train --from` clones a recorded policy that solves its task; the evaluation actor measures it."""

import json
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from penstock.launch.commands.request import Request
from penstock.launch.run.plan import make_plan, prepare_folder
from penstock.launch.run.supervisor import penstock
from penstock.learner.feed.recorded_feed import Recording
from penstock.learner.model import make_model
from penstock.learner.publish.kept_versions import FinalPolicy, write_final
from penstock.policy import weights
from tests.support.run.harness import PATIENCE_S

# Pushes where pole and cart lean and move to: balances for all of the 500 steps.
LEAN = (0.5, 1.0, 10.0, 3.0)


def balancing_run(run_dir: Path) -> None:
    """The folder of an ended run whose policy was not learned but set.

    A linear controller through two layers.
    """
    plan = make_plan(
        Request(what="CartPole-v1", run_dir=run_dir, assignments=("policy.hidden_sizes=[4, 4]",))
    )
    prepare_folder(plan)
    model = make_model(plan.settings)
    (policy,) = model.algorithm.published_modules().values()
    state = policy.state_dict()
    with torch.no_grad():
        for name in [name for name in state if name.startswith("actor")]:
            state[name].zero_()
        # Small numbers: tanh of them is nearly the numbers themselves.
        state["actor_body.layers.0.weight"][0] = torch.tensor(LEAN) / 100
        state["actor_body.layers.2.weight"][0, 0] = 1.0
        state["actor_head.weight"][1, 0] = 1000.0
    final = FinalPolicy(specification=model.specification, blob=weights.encode(policy), version=9, update=8)
    write_final(run_dir, final)


def penstock_json(*arguments: str) -> dict[str, Any]:
    done = subprocess.run(
        penstock(*arguments, "--json"), capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout))


def entropy(recording: Path) -> float:
    content = Recording(recording)
    arrays: list[Any] = [one for _, one in content.load(content.fragments)]
    return -float(np.concatenate([one["log_prob"][one["valid"]] for one in arrays]).mean())


def test_the_clone_of_a_solved_policy_solves_the_task(tmp_path: Path) -> None:
    teacher, recording, run = tmp_path / "teacher", tmp_path / "recording", tmp_path / "run"
    balancing_run(teacher)
    made = penstock_json("record", str(teacher), "--out", str(recording), "--steps", "8192")
    assert made["version"] == 9
    assert made["mean_return"] == 500.0
    assert 8192 <= made["steps"] < 8192 + 64 * 16
    assert Recording(recording).batches == ()
    summary = penstock_json(
        "train", "CartPole-v1", "--from", str(recording), "--run-dir", str(run), "--seed", "1",
        "--set", "algorithm.name=clone", "--set", "learner.total_steps=80000",
        "--set", "evaluation.both=true", "--set", "evaluation.episodes=20",
    )  # fmt: skip
    assert (summary["solved"], summary["ending"]) in ((True, "recording"), (True, "steps"))
    assert summary["evaluation"]["mean"] >= 475
    assert summary["evaluation"]["deterministic"]["episodes"] == 20
    assert summary["evaluation"]["sampled"]["mean"] >= 475
    assert summary["ledger"] == {"acked": 0, "trained": 0, "dropped": {}, "resident": 0, "balanced": True}
    assert summary["recording"]["fragments"] == made["fragments"]
    roles = {one["role"] for one in summary["processes"]}
    assert roles == {"launcher", "redis", "broker", "learner", "evaluator"}
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    # The teacher draws its actions: nothing predicts them better than the teacher's own probabilities.
    assert 0.95 * entropy(recording) < last["validation_nll"] < 1.15 * entropy(recording)
    assert last["validation_accuracy"] > 0.8
    assert last["evaluation_sampled"] == summary["evaluation"]["sampled"]["mean"]


def test_without_a_recording_there_is_nothing_to_clone(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"--from .*nowhere: holds no recording\.json"):
        make_plan(Request(what="CartPole-v1", run_dir=tmp_path, recording=tmp_path / "nowhere"))
    plan = make_plan(Request(what="CartPole-v1", run_dir=tmp_path, assignments=("algorithm.name=clone",)))
    with pytest.raises(
        ValueError, match=r"algorithm.name='clone': imitates a recording; name it with --from"
    ):
        make_model(plan.settings)
