"""What runs inside the image: the entry point, `check`, the health check."""
