"""Helpers of the tests: fakes, processes that tests start, generators of load, the simulated world."""
