"""How to divide the memory of a GPU between KV and states, from a model's config."""
