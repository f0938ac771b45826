"""The registry of policy versions: which are kept, which serve, how clients are routed. No torch."""
