"""Incidents that a person must notice, played against the real program under a real Prometheus."""
