"""Rollout workers: environments are stepped, what happened becomes fragments.

worker              the process: one session after the other
loop                the loop in a session: waits for credit, steps, hands over
generator           what is stepped: environments, policy, arrays
fragment_builder    steps as arrays, cut into fragments
observation_bounds  observations held against their space
episode_tracker     which episode each slot is in
seeds               seeds and place of an actor
"""
