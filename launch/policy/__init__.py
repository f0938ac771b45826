"""`penstock policy`: versions that a run has registered, and who is served which."""
