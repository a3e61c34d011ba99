"""Container engines: finding one, its commands, and its output."""
