"""Small environments whose optimum is known.

They prove what a policy can see and remember. A run names one as `Catch-v0`.
"""

import gymnasium

gymnasium.register("Catch-v0", f"{__name__}.catch:Catch", reward_threshold=0.95)
gymnasium.register("Courier-v0", f"{__name__}.courier:Courier", reward_threshold=0.5, max_episode_steps=20)
gymnasium.register("Recall-v0", f"{__name__}.recall:Recall", reward_threshold=0.95)
gymnasium.register("Menu-v0", f"{__name__}.menu:Menu", reward_threshold=7.78)
