"""Who starts and stops nodes."""
