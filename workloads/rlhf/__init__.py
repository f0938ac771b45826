"""Language models: feedback trains a reward model, whose scores train a policy that writes responses.

    feedback/   examples of prompt, response and score, or of two responses of which one is better
    reward/     the reward model: training, scores, the service that gives them, and other sources of rewards
    tokens      text to token ids
    tiny        a model small enough to be built, and trained, in a test
    sentiment   a task whose true reward and best policy are known

    policy/     the model that is trained: an adapter of it, values, and what it began with
    rollout/    generating responses, having them rewarded, and measuring them
    preparation what a run needs before it starts, rehearsal the same in short, artefacts what it leaves

Importing this package imports nothing heavy; `pip install 'penstock[rlhf]'` brings what the modules need.
"""

from penstock.config.workload import Workload

WORKLOAD = Workload(
    name="rlhf",
    environment="workloads.rlhf.environment:make",
    spaces="workloads.rlhf.environment:spaces",
    policy="workloads.rlhf.policy.policy:build",
    defaults="workloads.rlhf.defaults:for_environment",
    target="workloads.rlhf.environment:target",
    longest="workloads.rlhf.environment:longest",
    model="workloads.rlhf.learning:make_model",
    crew="workloads.rlhf.rollout.crew:make_crew",
    player="workloads.rlhf.rollout.player:make_player",
    places=("model", "prompts", "reward", "true_reward"),
    prepare="workloads.rlhf.preparation:prepare",
    rehearse="workloads.rlhf.rehearsal:rehearse",
    services="workloads.rlhf.preparation:services",
    artefacts="workloads.rlhf.artefacts:write",
)
