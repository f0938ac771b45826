"""When the policy is evaluated, and what the results mean for the run."""
