"""Clock, threads, signals, logging and service notifications."""
