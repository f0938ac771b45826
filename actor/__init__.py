"""Everything that acts: rollout workers and evaluation actors, with the session and outbox they share."""
