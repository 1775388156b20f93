"""Single mistakes put into the code on purpose, to see whether a test notices: `make mutants N=200 SEED=1`."""
