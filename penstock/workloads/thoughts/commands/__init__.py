"""`penstock thoughts`: conditions side by side, and the validation of what a run has learned.

thought_commands    the commands and their options
study               conditions by seeds: training, measuring, table
thought_check       the validation of a run's final policy
"""
