"""The environment of the workload. A run names it as `Prompts-v0`."""

import gymnasium

gymnasium.register("Prompts-v0", f"{__name__}.prompt_task:PromptTask")
