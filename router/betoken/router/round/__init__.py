"""The rounds of one admitted request: draft, verify, commit, failover."""
