"""`penstock chat`: what the workload adds to the command line."""
