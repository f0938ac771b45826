"""The RPCs of the policy server: requests are read, answered or refused."""
