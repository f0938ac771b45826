"""The environments of the workload. A run names one as `Goals-v0`."""

import gymnasium

gymnasium.register("Goals-v0", f"{__name__}.goal_task:GoalTask", max_episode_steps=50)
gymnasium.register("Traces-v0", f"{__name__}.trace_replay:TraceReplay")
