"""Prompts: which mutation makes a prompt better, chosen from the numbers of its embedding.

Importing this package imports nothing heavy, and nothing in it but the tasks imports Gymnasium.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="prompts",
    environment="penstock.workloads.control.environment:make",
    spaces="penstock.workloads.control.environment:spaces",
    environments={"Prompts-v0": "penstock.workloads.prompts.tasks"},
    target="penstock.workloads.control.environment:target",
    defaults="penstock.workloads.prompts.prompts_defaults:for_environment",
    policy="penstock.policy.build:build",
    acting="penstock.policy.acting_build:build_acting",
    model="penstock.workloads.plugin.learning:make_step_model",
    generator="penstock.workloads.plugin.acting:make_step_generator",
    runner="penstock.workloads.plugin.acting:make_step_runner",
    site="penstock.workloads.prompts.http.prompts_site:site",
    commands={"prompts": "penstock.workloads.prompts.commands.prompt_commands:prompt_commands"},
    places=("reward_source", "embedding_url", "embedding_key_file"),
)
