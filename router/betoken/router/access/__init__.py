"""Who may be served: the file of keys, and the caller behind a call."""
