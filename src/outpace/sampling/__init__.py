"""From logits to laws, and the noise that is spent on laws. Knows nothing of drafts, rules or models."""
