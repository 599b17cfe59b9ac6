"""Moving KV blocks: the reader pulls them from the owner's pool into its own; one file per transport."""
