"""The decode node: the home of a request; asks prefill for its prompt, pulls the blocks, writes the answer."""
