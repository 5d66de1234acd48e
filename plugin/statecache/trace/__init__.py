"""Traces of requests: the format, the recorder, generators and converters."""
