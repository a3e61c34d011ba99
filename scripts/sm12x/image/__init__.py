"""From a wheel to an image: container engines, the root filesystem, the bundle, and overlays."""
