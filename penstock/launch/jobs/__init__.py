"""Trainings that go on in the background of this machine, without a gateway: `penstock jobs`.

background_jobs   each as a folder of a run: started, listed, stopped
job_commands      the commands
"""
