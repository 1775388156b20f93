"""One file for each kind of receiver."""
