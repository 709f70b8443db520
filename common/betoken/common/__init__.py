"""What the SDK and every service share: errors, names, addresses, TLS, traces. Needs the base install only."""
