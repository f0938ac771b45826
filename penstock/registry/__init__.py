"""Which policy versions are kept, which of them serve, and who gets which (SQLAlchemy; no torch)."""
