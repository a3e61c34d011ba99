"""One module a verb: parse, call, print. Nothing else in the package prints."""
