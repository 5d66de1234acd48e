"""What runs one arm of an A/B test: a replay, an engine's cache layer, or a server."""
