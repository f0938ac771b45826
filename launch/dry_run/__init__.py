"""`penstock train CONFIG --dry-run`.

Predict what a run will take, from short runs of the very same processes.

dry_run_command  the order of steps: rehearse the preparation, calibrate twice, predict, refuse, print, store
calibration      one short run in a folder that is thrown away, and its measurements
pace             seconds per step from the lines of a run: pure
prediction       time, memory and disk of the whole run from calibrations: pure
limits           the resources of this machine, and which prediction exceeds them: pure but for reading them
report           the results for people
"""
