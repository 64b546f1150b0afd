"""Who executes an algorithm's requests."""
