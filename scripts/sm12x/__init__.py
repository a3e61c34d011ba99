"""sm12x: patched, audited vLLM images for consumer Blackwell (SM12x) GPUs."""

__version__ = "0.1.0"
