"""A Stable-Baselines3 policy behind FastAPI and uvicorn, in an environment of its own (`make bench-peers`).

`python fastapi_sb3.py PORT` answers POST /act {"observation": [4 numbers]} with {"action": 0 or 1}, drawn.
CartPole's shapes, 64-64, never trained: how quickly it answers does not depend on that.
"""

import sys

import numpy as np
import torch
import uvicorn  # type: ignore[import-not-found, unused-ignore]
from fastapi import FastAPI  # type: ignore[import-not-found, unused-ignore]
from pydantic import BaseModel
from stable_baselines3 import PPO  # type: ignore[import-not-found, unused-ignore]


class Asked(BaseModel):
    """The body of a request."""

    observation: list[float]


def make_app() -> FastAPI:
    """Return the application with one policy, in the event loop's thread.

    Another thread would take longer.
    """
    torch.set_num_threads(1)
    policy = PPO("MlpPolicy", "CartPole-v1", device="cpu").policy

    async def act(asked: Asked) -> dict[str, int]:
        action, _ = policy.predict(np.asarray(asked.observation, np.float32))
        return {"action": int(action)}

    app = FastAPI()
    app.add_api_route("/act", act, methods=["POST"])
    return app


if __name__ == "__main__":
    uvicorn.run(make_app(), host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", access_log=False)
