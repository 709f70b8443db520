"""The economy of drafts without a clock: recorded costs and texts, and a simulator that drives the deciding code."""
