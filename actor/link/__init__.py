"""An actor's link to the broker: connection, session, outbox. Loads no torch.

connect          opens the link of a process
broker_client    every call of the broker as a function of dataclasses
repeated_calls   the connection, and calls on it until they are answered
session_opening  from one session to the next
session          an open session: newest weights, credit, run state
weight_fetch     large weights in chunks
outbox           fragments and reports until they are acknowledged
fragment_queue   which fragments go into the next message
journal_file     a file of lines that a crash may tear
ack_journal      the actor's own record, for the audit
sample_journal   a server's own record of what it sampled, for the audit
"""
