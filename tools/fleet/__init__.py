"""`make fleet`: a fleet of real processes in a storm of events."""
