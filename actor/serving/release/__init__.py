"""Which versions get traffic, and how a canary is judged."""
