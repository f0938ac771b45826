"""Thoughts: a model learns to think before it answers, and a validation finds thoughts that are theatre."""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="thoughts",
    environment="penstock.workloads.thoughts.environment:make",
    spaces="penstock.workloads.thoughts.environment:spaces",
    target="penstock.workloads.thoughts.environment:target",
    defaults="penstock.workloads.thoughts.environment:for_environment",
    policy="penstock.workloads.thoughts.model:build",
    model="penstock.workloads.thoughts.reinforce:make_thought_model",
    generator="penstock.workloads.thoughts.acting:make_generator",
    runner="penstock.workloads.thoughts.acting:make_runner",
    places=("model", "task", "guard_rules", "guard_classifier"),
    algorithms={"thought_reinforce": "penstock.workloads.thoughts.environment:ThoughtReinforceSection"},
    commands={"thoughts": "penstock.workloads.thoughts.thought_commands:thought_commands"},
    server="penstock.workloads.thoughts.acting:make_server",
    prepare="penstock.workloads.thoughts.start:prepare",
)
