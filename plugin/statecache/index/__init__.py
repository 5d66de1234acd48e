"""Which state to drop: the eviction policies, natively and in plain Python."""
