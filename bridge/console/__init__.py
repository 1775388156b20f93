"""The web console: the fleet on one page, from the events that the forwarders publish."""
