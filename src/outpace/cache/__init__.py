"""KV rows: the store contract (base) and the store with one buffer per sequence (slots)."""
