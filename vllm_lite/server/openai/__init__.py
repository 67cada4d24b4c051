"""OpenAI's formats: request bodies, prompts, answers, logprobs, errors, the document of all of them."""
