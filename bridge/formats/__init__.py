"""One file for each way in which an event is shown."""
