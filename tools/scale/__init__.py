"""What 10,000 VMs need of one namespace: formulas, a simulation of a bad minute, and the tables of the page."""
