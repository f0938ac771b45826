"""The loop: what people say of a chat trains the next version, which is tried as a canary."""
