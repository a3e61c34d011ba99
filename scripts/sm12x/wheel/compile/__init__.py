"""Native modules: configured, compiled unit by unit within cores and memory."""
