"""The registry of policy versions: which are kept, which serve, how clients are routed. No torch.

registry         every operation, one transaction each
records          what it returns
registry_errors  what it raises
kept             versions that are kept
version_ranges   numbers that are reserved for the versions of a run
version_labels   names that versions have beside their numbers, for good
transitions      promotion, rollback, retirement
steering         traffic of a policy
routing          which version answers a client
judgement        a canary on trial, for all servers together
canary_trial     when it is found worse, or better
bounds           what is compared, and how much worse is worse
evidence         e-processes: evidence that may be looked at at any time
feedback         rewards that came too late
ratings          ratings of responses
rating_usage     how many ratings a project has, and may have
weight_files     weights as files
database         connections and transactions
models           tables
rows             rows and records
table_schema     makes the tables, refuses those of another revision
snapshot         a file that is only read
migrations/      the revision that makes the tables
"""

import logging

# Before it is imported, for it logs while it is: nothing that an operator of a registry needs.
logging.getLogger("alembic").setLevel(logging.WARNING)
