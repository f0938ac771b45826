"""The registry of policy versions.

Which are kept, which serve, and how clients are routed (SQLAlchemy; no torch).
"""

import logging

# Before it is imported, for it logs while it is: nothing that an operator of a registry needs.
logging.getLogger("alembic").setLevel(logging.WARNING)
