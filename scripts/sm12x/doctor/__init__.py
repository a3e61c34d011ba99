"""Checks of a host for a server on SM12x. Everything here only reads.

``examine`` reads facts (under a root folder, so that tests can give a tree of their own) and runs
the checks, pure functions from facts to findings; ``render`` and ``report`` put them into words and
JSON.
"""
