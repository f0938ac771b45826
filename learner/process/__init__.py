"""The learner as a process: entry → opening → assembly → learner_run → loop.

entry            from the first line of the process to its exit code
opening          takes the lease, begins or resumes the run, opens the log
assembly         makes and connects every part
learner_run      starts the threads, has the loop learn, ends them
loop             batch, update, publication, checkpoint, in order
interruptions    what may end a wait of the loop
closing          what follows the last update
ending           how the loop may end
bookkeeping      what became of each batch
account          where the run is, and the final account
run_checkpoints  collects what a checkpoint holds
replay_reload    replay, read again after a restart
non_finite       updates that were undone
stall            whether the run makes progress
commands/        what operators ask for
"""
