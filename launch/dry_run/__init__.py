"""`penstock train CONFIG --dry-run`: what a run will take, from short runs of the very same processes.

command      the order of things: rehearse the preparation, calibrate twice, predict, refuse, print, store
calibration  one short run in a folder that is thrown away, and what is measured of it
pace         seconds per step from the lines of a run: pure
prediction   time, memory and disk of the whole run from calibrations: pure
limits       what this machine has, and what does not fit: pure but for the looking
stored       where a prediction waits for its run, and how the two compare
report       all of it for people
"""
