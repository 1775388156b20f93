"""HTTP requests with limits on time and size, and signing."""
