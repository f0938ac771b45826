"""Small environments whose optimum is known, for proofs of what a policy can see: `workloads.control.tasks:Recall-v0`."""

import gymnasium

gymnasium.register("Recall-v0", f"{__name__}.recall:Recall", reward_threshold=0.95)
gymnasium.register("Menu-v0", f"{__name__}.menu:Menu", reward_threshold=7.78)
