"""An actor's link to the broker: connection, session, outbox. Loads no torch."""
