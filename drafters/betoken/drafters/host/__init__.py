"""The drafter host that draft workers and verify workers share."""
