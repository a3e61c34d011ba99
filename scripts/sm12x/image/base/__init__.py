"""The base of an image build: root filesystem, platform, the host's network settings."""
