"""A workload imports these five modules of the processes that run it, and nothing else of actor and learner.

`docs/tutorials/add-a-workload.md` shows a whole workload.
"""
