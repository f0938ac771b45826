"""python -m tests.learning.cartpole_clients ADDRESS PLAYERS SEED.

Players of CartPole that go on until they are killed.

A player whose server is away, or has forgotten it, begins anew.
"""

import sys
import threading

import gymnasium as gym

from penstock import ExternalEnvironment, PolicyClient, PolicyError

FOR_EVER = 10**9
PAUSE_S = 0.2


def play(address: str, seed: int) -> None:
    """One player."""
    environment = gym.make("CartPole-v1")
    while True:
        try:
            with PolicyClient(address) as client:
                player = ExternalEnvironment(client, client_key=f"player-{seed}")
                for _ in player.run(environment, FOR_EVER, seed=seed):
                    pass
        except PolicyError as error:
            print(f"player {seed}: {error}", file=sys.stderr, flush=True)
            threading.Event().wait(PAUSE_S)


if __name__ == "__main__":
    place, players, first = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for index in range(players):
        threading.Thread(target=play, args=(place, first + index)).start()
