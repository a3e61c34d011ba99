"""The verbs of `sm12x-dev`: parse, call, print."""
