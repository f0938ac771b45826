"""Thoughts: a model learns to think before it answers, and is told when its thoughts are theatre.

It stands on `workloads.language`. Importing this package imports nothing heavy; `pip install
'penstock-rl[rlhf]'` brings what the modules need.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="thoughts",
    environment="workloads.thoughts.thought_environment:make",
    spaces="workloads.thoughts.thought_environment:spaces",
    target="workloads.thoughts.thought_environment:target",
    defaults="workloads.thoughts.thought_defaults:for_environment",
    policy="workloads.thoughts.thinking_policy:build",
    model="workloads.thoughts.algorithm.thought_model:make_thought_model",
    generator="workloads.thoughts.acting.thought_generator:make_generator",
    runner="workloads.thoughts.acting.thought_evaluation:make_runner",
    places=("model", "task", "guard_rules", "guard_classifier"),
    algorithms={"thought_reinforce": "workloads.thoughts.thought_settings:ThoughtReinforceSection"},
    commands={"thoughts": "workloads.thoughts.commands.thought_commands:thought_commands"},
    server="workloads.thoughts.thought_server:make_server",
    prepare="workloads.thoughts.start.thoughts_start:prepare",
)
