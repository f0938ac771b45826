"""The registry of policy versions: which are kept, which serve, how clients are routed. No torch."""

import logging

# Before it is imported, for it logs while it is: nothing that an operator of a registry needs.
logging.getLogger("alembic").setLevel(logging.WARNING)
