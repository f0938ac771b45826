"""A program of somebody who knows the HTTP service and nothing of Penstock: agent_program.py URL MAX_STEPS.

It gives feedback, asks what a training would take, trains, and lists what was trained. Its token lies in a
netrc file, which `requests` reads by itself. It prints one JSON object.
"""

import json
import sys

import requests  # type: ignore[import-untyped, unused-ignore]


def main(base: str, max_steps: int) -> None:
    answers = ["yes of course", "no", "maybe later", "that is right", "ask me again"]
    for number in range(15):
        reply = requests.post(
            f"{base}/api/policies/feedback/my_agent",
            json={
                "prompt": f"question {number} of the day",
                "response": answers[number % 5],
                "score": 0.5 + 0.1 * (number % 5),
                "runId": f"run-{number}",
            },
            timeout=60,
        )
        reply.raise_for_status()
    told = {"dryRun": True, "maxSteps": max_steps}
    dry = requests.post(f"{base}/api/policies/train_policy/my_agent", json=told, timeout=900).json()
    told = {"dryRun": False, "maxSteps": max_steps}
    result = requests.post(f"{base}/api/policies/train_policy/my_agent", json=told, timeout=900).json()
    listed = requests.get(f"{base}/api/policies/my_agent", timeout=60).json()
    found = {
        "dry": dry,
        "trained": [result["version"], result["rewardMean"], result["rewardStd"]],
        "listed": [[one["version"], one["metrics"]["rewardMean"]] for one in listed],
        "result": result,
        "rows": listed,
    }
    sys.stdout.write(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
