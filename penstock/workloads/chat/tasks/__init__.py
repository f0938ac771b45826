"""The environments of the workload. A run names one as `Candidates-v0`."""

import gymnasium

gymnasium.register("Chat-v0", f"{__name__}.chat_environment:ChatEnvironment")
gymnasium.register("Candidates-v0", f"{__name__}.candidate_task:CandidateTask")
