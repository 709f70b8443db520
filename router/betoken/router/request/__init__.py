"""Records that every part of the router shares: a validated request, the served model and its identity."""
