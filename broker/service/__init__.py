"""The gRPC front of the log: services, admission, and what wakes the calls that wait.

process             the process
experience_service  sessions, fragments and reports, on their way up
admission           fragments held against the run's schema
staging             the bound on bytes that are staged
asking_again        when those ask again who come before the run
session_owners      sessions belong to who opened them
weight_service      weights, credit and run state, on their way down
weight_cache        chunks of weights that are asked for
last_credit         the newest reply to each session
changes             wakes calls that wait for a change
control_service     what operators see and want
command_messages    commands of theirs as messages
versions            versions and traffic, from the registry
version_messages    the same as messages
monitor             readiness and gauges
call_rules          what every handler checks
calls_in_flight     whether there is work in hand
"""
