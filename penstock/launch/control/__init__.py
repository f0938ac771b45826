"""`penstock control`: what operators want of a run."""
