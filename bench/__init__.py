"""Runners that print series and ratios of one run; they are no tests and assert nothing."""
