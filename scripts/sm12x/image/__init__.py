"""From a wheel to an image: engines, base image, the bundle, and what runs inside the image."""
