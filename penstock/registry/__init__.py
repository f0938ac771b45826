"""The registry of policy versions.

Which are kept, which serve, and how clients are routed (SQLAlchemy; no torch).
"""

import logging

# Before it is imported, for it talks while it is: nothing that is news to who has a registry.
logging.getLogger("alembic").setLevel(logging.WARNING)
