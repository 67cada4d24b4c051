"""Cohere's package: a ranking, by both of its clients."""

import cohere
from common import URL, check

texts = ["a boat", "a cat", "a dog"]
ranked = cohere.ClientV2(api_key="none", base_url=URL).rerank(model="demo", query="cat", documents=texts, top_n=2)
check(len(ranked.results) == 2)
old = cohere.Client(api_key="none", base_url=URL).rerank(
    model="demo", query="cat", documents=texts, return_documents=True
)
check({each.document.text for each in old.results} == set(texts))
