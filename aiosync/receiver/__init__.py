"""The worker's runtime: it receives updates of one model, and applies them."""
