"""The prefill node: reads prompts and holds their blocks until the decode node has pulled them."""
