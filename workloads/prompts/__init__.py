"""Prompts: which mutation makes a prompt better, chosen from the numbers of its embedding.

    prompt_text        what a prompt may be, and the sections that mutations add
    mutations          the five mutations, as functions of text
    features           which mutations a prompt has no need of, and its length
    categories         the seven categories, and the classifier
    prompt_reward      what a prompt is worth, and a step from one to the next
    source_reward      rewards from a function, an endpoint or the reward service
    checked_reward     those that a person checks now and then
    task_parts         what a task embeds and rewards with, as its settings say
    embeddings         a text as 1,536 numbers
    http_embeddings    those of a server that speaks as OpenAI's does
    prompt_sources     prompts to train on, and others to test on
    subjects           what the built-in prompts are about
    optimise           the best text that a policy leads to, with the way there
    http               the API over HTTP
    commands           `penstock prompts`: embeddings of a model, from a process of its own
    tasks              `Prompts-v0`
    prompts_defaults   settings of a run

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
