"""`penstock thoughts`: the seven conditions side by side, and the validation of what a run has learned.

thought_commands    the commands and their options
conditions          the seven conditions of one seed
condition_runs      those that learn by reinforcement: runs with all their processes
conditions_table    what they came to: table, curves, verdicts
condition_gates     what must hold of them, with bounds
conditions_command  all seeds of it, and the files
plan_file           which recipe a folder of comparisons is of
vary_command        an ablation: one setting varied, a run for each value
gradient_variance   how noisy the gradient is with each baseline
thought_check       the validation of a run's final policy
"""
