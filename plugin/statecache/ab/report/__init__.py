"""What is made of the measurements: the result file, the page and its charts."""
