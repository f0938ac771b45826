"""All tables of a registry."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = None
branch_labels = None
depends_on = None

_TIME = sa.DateTime(timezone=True)


def upgrade() -> None:
    """Make all tables."""
    _policy_versions()
    _version_names()
    _traffic()
    _events()
    _trials()
    _late_rewards()
    _ratings()


def _number() -> sa.Column[int]:
    return sa.Column("number", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False)


def _policy_versions() -> None:
    op.create_table(
        "policy_versions",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.Column("parent", sa.BigInteger),
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("update_count", sa.BigInteger, nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("size_bytes", sa.BigInteger, nullable=False),
        sa.Column("configuration", sa.String(64), nullable=False),
        sa.Column("evaluation", sa.JSON),
        sa.Column("origin", sa.String(16), nullable=False),
        sa.Column("status", sa.String(16), nullable=False),
        sa.Column("standby", sa.Boolean, nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("changed", _TIME, nullable=False),
        sa.Column("place", sa.Text, nullable=False, server_default=""),
        sa.PrimaryKeyConstraint("policy", "version", name=op.f("pk_policy_versions")),
        sa.CheckConstraint("NOT standby OR status = 'retired'", name=op.f("ck_policy_versions_standby")),
        sa.CheckConstraint(
            "origin IN ('best', 'periodic', 'final', 'rollback', 'import')",
            name=op.f("ck_policy_versions_origin"),
        ),
        sa.CheckConstraint(
            "status IN ('candidate', 'canary', 'active', 'retired', 'rolled_back')",
            name=op.f("ck_policy_versions_status"),
        ),
    )
    for name, condition in (
        ("active", "status = 'active'"),
        ("canary", "status = 'canary'"),
        ("standby", "standby"),
    ):
        op.create_index(
            f"one_{name}",
            "policy_versions",
            ["policy"],
            unique=True,
            sqlite_where=sa.text(condition),
            postgresql_where=sa.text(condition),
        )


def _version_names() -> None:
    op.create_table(
        "version_ranges",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("run", sa.String(64), nullable=False),
        sa.Column("first", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("policy", "run", name=op.f("pk_version_ranges")),
    )
    op.create_index("ix_version_ranges_first", "version_ranges", ["policy", "first"], unique=True)
    op.create_table(
        "version_labels",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("label", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("policy", "label", name=op.f("pk_version_labels")),
    )


def _traffic() -> None:
    op.create_table(
        "traffic",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("revision", sa.BigInteger, nullable=False),
        sa.Column("experiment", sa.String(64), nullable=False),
        sa.Column("canary_share", sa.Double, nullable=False),
        sa.Column("latest_share", sa.Double, nullable=False),
        sa.Column("shadow", sa.BigInteger),
        sa.Column("pins", sa.JSON, nullable=False),
        sa.Column("changed", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("policy", name=op.f("pk_traffic")),
        sa.CheckConstraint(
            "canary_share >= 0 AND latest_share >= 0 AND canary_share + latest_share <= 1",
            name=op.f("ck_traffic_shares"),
        ),
    )


def _events() -> None:
    op.create_table(
        "events",
        _number(),
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger),
        sa.Column("action", sa.String(16), nullable=False),
        sa.Column("by_whom", sa.String(128), nullable=False),
        sa.Column("reason", sa.Text, nullable=False),
        sa.Column("detail", sa.JSON, nullable=False),
        sa.Column("time", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_events")),
        sa.CheckConstraint(
            "action IN ('registered', 'evaluated', 'promoted', 'rolled_back', 'retired', 'traffic')",
            name=op.f("ck_events_action"),
        ),
    )
    op.create_index(op.f("ix_events_policy"), "events", ["policy"])


def _trials() -> None:
    op.create_table(
        "trials",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("trial", sa.String(160), nullable=False),
        sa.Column("state", sa.Text, nullable=False),
        sa.Column("changed", _TIME, nullable=False),
        sa.PrimaryKeyConstraint("policy", name=op.f("pk_trials")),
    )
    op.create_table(
        "trial_clients",
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("client", sa.String(16), nullable=False),
        sa.Column("level", sa.Integer, nullable=False),
        sa.PrimaryKeyConstraint("policy", "client", "level", name=op.f("pk_trial_clients")),
    )


def _late_rewards() -> None:
    op.create_table(
        "feedback",
        _number(),
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("episode", sa.String(128), nullable=False),
        sa.Column("step", sa.BigInteger, nullable=False),
        sa.Column("amount", sa.Double, nullable=False),
        sa.Column("time", _TIME, nullable=False),
        sa.Column("caller", sa.String(16), nullable=False, server_default=""),
        sa.Column("request_key", sa.String(64)),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_feedback")),
    )
    op.create_index(op.f("ix_feedback_episode"), "feedback", ["episode"])
    op.create_index("ix_feedback_caller", "feedback", ["caller", "number"])
    op.create_index("ix_feedback_request_key", "feedback", ["policy", "request_key"], unique=True)


def _ratings() -> None:
    op.create_table(
        "ratings",
        _number(),
        sa.Column("policy", sa.String(64), nullable=False),
        sa.Column("version", sa.BigInteger),
        sa.Column("conversation", sa.String(128), nullable=False),
        sa.Column("key", sa.String(64), nullable=False),
        sa.Column("source", sa.String(128), nullable=False),
        sa.Column("prompt", sa.JSON, nullable=False),
        sa.Column("response", sa.Text, nullable=False),
        sa.Column("score", sa.Double),
        sa.Column("rejected", sa.Text),
        sa.Column("created", _TIME, nullable=False),
        sa.Column("public_id", sa.String(32), nullable=False, server_default=""),
        sa.Column("project", sa.String(24), nullable=False, server_default=""),
        sa.Column("run", sa.String(64), nullable=False, server_default=""),
        sa.Column("rater", sa.String(32), nullable=False, server_default=""),
        sa.Column("notes", sa.Text, nullable=False, server_default=""),
        sa.Column("request_key", sa.String(64)),
        sa.Column("text_bytes", sa.BigInteger, nullable=False, server_default="0"),
        sa.PrimaryKeyConstraint("number", name=op.f("pk_ratings")),
        sa.CheckConstraint("(score IS NULL) <> (rejected IS NULL)", name=op.f("ck_ratings_kind")),
    )
    op.create_index(op.f("ix_ratings_policy"), "ratings", ["policy"])
    op.create_index("ix_ratings_rater", "ratings", ["project", "rater"])
    op.create_index("ix_ratings_request_key", "ratings", ["policy", "request_key"], unique=True)
    op.create_table(
        "rating_usage",
        sa.Column("project", sa.String(24), nullable=False),
        sa.Column("ratings", sa.BigInteger, nullable=False),
        sa.Column("text_bytes", sa.BigInteger, nullable=False),
        sa.PrimaryKeyConstraint("project", name=op.f("pk_rating_usage")),
    )
