"""The run in Redis: its keys and scripts, and what the services and the learner do with them. No gRPC.

keys             every key of a run
scripts/         the Lua scripts, each one atomic step
script           loads them
envelope         layout and incarnation around every reply of theirs
replies          their replies as dataclasses
store            the side of the gRPC services
appends          appends that share a pipeline
line             the connection on which they and all scripts are sent
store_records    what the store is given and returns
learner_log      the learner's side: lease, publication, commit, trim
log_reader       the same: entries, payloads, reports
learner_records  what the learner's side is given and returns
learner_calls    retries and fences of the learner's calls
log_memory       what the learner knows, should Redis forget
kept_weights     weights of versions that are kept
commands         commands of operators
connection       Redis clients
guard            whether a Redis server may hold a run
entry_memory     what an entry takes of Redis's memory
audit_log        what the audit reads
"""
