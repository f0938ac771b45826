"""The examples that the HTTP service prints for its callers, and a reader of every field of them."""

from typing import Any, Final

GIVEN: Final = {"prompt": "What is RL?", "response": "Learning by reward.", "score": 0.9, "runId": "run-1"}
ASKED: Final = {"dryRun": False, "maxSteps": 1000, "learningRate": 1e-5}
TRAINED: Final = {
    "status": "trained",
    "policyId": "5f0c",
    "version": "v15",
    "modelPath": "models/my_agent/v15/policy",
    "rewardModelPath": "models/my_agent/v15/reward_model",
    "feedbackCount": 15,
    "trainingSteps": 1000,
    "rewardMean": 0.75,
    "rewardStd": 0.12,
}
DRY_RUN: Final[dict[str, Any]] = {
    "status": "dry_run",
    "feedbackCount": 15,
    "estimatedSteps": 1000,
    "estimatedTimeMinutes": 16.7,
    "scoreMean": 0.75,
    "scoreStd": 0.15,
    "modelConfig": {"base_model": "gpt2", "use_lora": True, "learning_rate": 1e-5},
}
LISTED: Final = [{"version": "v15", "metrics": {"rewardMean": 0.75}}]


def differences(printed: Any, answered: Any, place: str = "answer") -> list[str]:
    """Return what the fields of a printed answer are in an answered one where they differ."""
    if isinstance(printed, dict):
        if not isinstance(answered, dict):
            return [f"{place} is {answered!r}"]
        found = [f"{place}.{name} is absent" for name in printed.keys() - answered.keys()]
        for name in printed.keys() & answered.keys():
            if name == "status" and answered[name] != printed[name]:
                found.append(f"{place}.status is {answered[name]!r}")
            found += differences(printed[name], answered[name], f"{place}.{name}")
        return sorted(found)
    if isinstance(printed, list):
        one = answered[0] if isinstance(answered, list) and answered else None
        return differences(printed[0], one, f"{place}[0]")
    number = {int, float} if isinstance(printed, float) else {type(printed)}
    return [] if type(answered) in number else [f"{place} is {answered!r}"]
