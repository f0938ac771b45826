"""Checkpoints: writing them, choosing one, resuming from it.

checkpointer       when one is due, and the order of its steps
store              checkpoints on disk
resume             which one a learner begins from
resume_options     options that say so
named_checkpoints  those that an operator has named
"""
