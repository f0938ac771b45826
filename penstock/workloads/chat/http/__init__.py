"""The page `/chat` of a gateway and its API: people talk to the versions of a run and rate what they say."""
