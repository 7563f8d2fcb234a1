"""The worker's runtime: what receives updates of one model, and puts them into it."""
