"""`penstock policy`: the versions that a run has registered, and the traffic between them."""
