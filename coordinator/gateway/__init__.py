"""The OpenAI-compatible HTTP front of the cluster."""
