import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from penstock.config.settings import PolicySection
from penstock.gateway.jobs.job_records import Job
from penstock.gateway.store.tables import JobState
from penstock.learner.publish.kept_versions import write_specification
from penstock.policy import weights
from penstock.policy.policy import build
from penstock.protocol.spaces import Discrete
from penstock.registry.records import NewVersion, Origin
from penstock.registry.registry import Registry
from penstock.registry.weight_files import registry_url, write_kept
from penstock.workloads.goals.injection_journal import INJECTIONS
from tests.support.run.small_run import OBSERVATION, RUN, specification
from tests.support.storage.postgresql_server import with_registry

# ---- Templates of jobs for tests.


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


# ---- A job that a gateway has taken from its queue, for tests of a runner by itself.


def taken_job(template: str = "quick", steps: int = 2) -> Job:
    """One of a template of `job_templates`."""
    now = datetime.now(UTC)
    return Job(
        id="0" * 24,
        project="alpha",
        agent="agent-",
        template=template,
        numbers={"maxSteps": steps, "learningRate": 3e-4} if template == "quick" else {},
        facts={},
        by="user/ada",
        state=JobState.RUNNING,
        cause="",
        place="here",
        cancelled_by=None,
        result=None,
        created=now,
        began=now,
        ended=None,
    )


# ---- The folder of a run that is over: with a registry of its own, in which three versions are kept.


VERSIONS: Final = (3, 5, 9)


def write_run(folder: Path, policy: str = "default") -> Path:
    """Make the folder: VERSIONS of a policy, of which 3 is active; returns it."""
    folder.mkdir(parents=True)
    write_specification(folder, specification())
    with Registry.open(with_registry(registry_url(folder)), migrate=True) as registry:
        for version in VERSIONS:
            blob = weights.encode(build(OBSERVATION, Discrete(2), PolicySection(), seed=version))
            write_kept(folder, version, blob)
            registry.register(
                NewVersion(
                    policy=policy,
                    version=version,
                    run=RUN,
                    update=version,
                    sha256=weights.sha256(blob),
                    size_bytes=len(blob),
                    origin=Origin.PERIODIC,
                ),
                by="learner",
            )
        registry.promote(policy, VERSIONS[0], "first", by="learner")
    return folder


# ---- Files of an injector of goals, as it leaves them.


def goal(name: str, *, injected: bool = False, held: str = "") -> dict[str, Any]:
    """A line of a goal."""
    return {
        "goal_id": name, "goal": "trim", "timestamp": 1.0, "reasoning": "", "priority": 0.5,
        "confidence": 0.5, "expected_reward": None, "version": 1, "injected": injected, "processed": False,
        "metadata": {"held": held},
    }  # fmt: skip


def write_goals(folder: Path, *lines: dict[str, Any]) -> None:
    """The file of proposals."""
    (folder / INJECTIONS).write_text("".join(json.dumps(line) + "\n" for line in lines))
