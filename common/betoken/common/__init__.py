"""Shared by the SDK and every service: errors, names, addresses, TLS, traces. Needs the base install only."""
