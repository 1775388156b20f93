"""Single mistakes put into the code on purpose, to see whether a test notices: `make mutants N=200 SEED=1`.

Two packages were tried instead. cosmic-ray 8.7 runs one command for every mistake, here the whole suite, and finds
9,000 mistakes in the six packages, most of them one operator for another, annotations included. mutmut 3.8 is quick
with the unit tests of one package (632 mistakes of `events` in five minutes), but with the integration tests it
stopped at a usage error of pytest. Neither chooses some at random, or swaps statements.
"""
