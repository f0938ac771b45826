"""The gateway's own database: accounts, tokens, jobs and the audit. No learner and no run sees it."""
