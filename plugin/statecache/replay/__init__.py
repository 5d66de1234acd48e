"""What each policy would have reused: traces played through a model of the caches."""
