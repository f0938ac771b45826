"""The processes of one run on this machine, from plan to summary.

request             options of `penstock train`
plan                resolved settings and the run's folder
resumed_run         whether a run can go on under other settings
preparation         what its workload makes first
services            which services it has, with their command lines
run                 from start to drain
drain_bounds        by when the services of a drain are gone
supervisor          keeps services alive
supervised_service  whether one that died is started again
child_process       one service as a process
fork_server         what services are copies of
forked_service      the program of it, and what a copy becomes
rank_processes      the other ranks of a learner
redis_service       `penstock redis`
redis_binary        which `redis-server`
external_redis      a Redis that the user brings
progress            how far the run is
live_view           what a person sees meanwhile
watched_stream      the stream it is shown on, whose reader may go away
disk                whether its folders can be written
memory              what its processes need
learner_account     the learner's final account
summary             `summary.json`
"""
