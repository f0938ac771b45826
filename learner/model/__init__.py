"""What a run learns with, made from its settings.

model            spaces, policy, algorithm, schema, specification
stepwise         the same where one forward pass is one step
capacity_checks  whether a run fits into Redis and memory
device           device and threads
"""
