"""The pool that checkpoints live in, and the copies into and out of it."""
