"""The page of goals in a gateway, at `/rl`, and the routes behind it."""
