"""`penstock thoughts`: conditions side by side, and the validation of what a run has learned."""
