"""Container engines: which there are, what each is asked, and what it prints."""
