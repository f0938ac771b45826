"""Prompts: which mutation makes a prompt better, chosen from the numbers of its embedding.

Importing this package imports nothing heavy, and nothing in it but the tasks imports Gymnasium.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="prompts",
    environment="workloads.control.environment:make",
    spaces="workloads.control.environment:spaces",
    target="workloads.control.environment:target",
    defaults="workloads.prompts.prompts_defaults:for_environment",
    policy="penstock.policy.build:build",
    acting="penstock.policy.acting_build:build_acting",
    model="workloads.plugin.learning:make_step_model",
    generator="workloads.plugin.acting:make_step_generator",
    runner="workloads.plugin.acting:make_step_runner",
    site="workloads.prompts.http.prompts_site:site",
    commands={"prompts": "workloads.prompts.commands.prompt_commands:prompt_commands"},
    places=("reward_source", "embedding_url", "embedding_key_file"),
)
