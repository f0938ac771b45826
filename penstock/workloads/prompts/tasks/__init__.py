"""The environment of the workload. A run names it as `penstock.workloads.prompts.tasks:Prompts-v0`."""

import gymnasium

gymnasium.register("Prompts-v0", f"{__name__}.prompt_task:PromptTask")
