"""Trainings that people ask for: their queue, and the dispatcher that has them run and sees them end.

job_records       what is said of a job, a template and an outcome
job_queue         jobs in the database
job_kinds         what a workload adds to a training
runner            the seam: what starts jobs, finds them again and ends them
dry_run_turns     who has the next dry run
job_dispatcher    the loop that takes jobs from the queue and settles them
steering          the seam: what steers the run of a job
policy_versions   what jobs trained
trained_from      which trainings read ratings that were deleted
log_stream        the log of a job as events
live_jobs         the jobs of a project as events
shared_looks      what many readers of such streams look at together
"""
