"""KV blocks: who owns them (block_pool), which are named (prefix_cache), where they lie (cache)."""
