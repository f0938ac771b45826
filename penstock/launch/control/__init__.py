"""`penstock control`: the orders of operators to a run."""
