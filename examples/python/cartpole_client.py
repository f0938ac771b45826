"""python examples/python/cartpole_client.py ADDRESS [EPISODES]: CartPole here, its policy there, learning."""

import sys

import gymnasium as gym

from penstock import ExternalEnvironment, PolicyClient


def main(address: str = "127.0.0.1:50052", episodes: str = "10") -> None:
    """Print the return of each episode."""
    with PolicyClient(address) as client:
        for total_return in ExternalEnvironment(client).run(gym.make("CartPole-v1"), int(episodes)):
            print(total_return, flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
