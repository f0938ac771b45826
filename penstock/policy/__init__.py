"""Networks, distributions, normaliser and the weights codec (torch)."""
