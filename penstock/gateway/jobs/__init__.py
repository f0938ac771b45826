"""Jobs of a gateway: their queue in the database, and the dispatcher that has them run."""
