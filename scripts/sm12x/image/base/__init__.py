"""What an image stands on: its root file system, its platform, the host's network settings."""
