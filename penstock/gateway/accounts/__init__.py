"""Who calls: users, projects and members, API tokens, sessions, and what each of them did."""
