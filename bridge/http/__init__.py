"""HTTP requests with a limit on the whole exchange, and signing."""
