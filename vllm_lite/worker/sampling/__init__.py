"""From logits to tokens: rules, draws, logprobs, drafts."""
