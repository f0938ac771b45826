"""What carries a goal out: the simulated host, or commands of this machine."""
