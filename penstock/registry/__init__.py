"""Which policy versions are kept, which of them serve, and who gets which (SQLAlchemy; no torch)."""

import logging

# Before it is imported, for it talks while it is: nothing that is news to who has a registry.
logging.getLogger("alembic").setLevel(logging.WARNING)
