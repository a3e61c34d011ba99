"""What runs inside the image: the entry point, the proof, the health check."""
