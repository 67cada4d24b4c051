"""Cohere's package: a ranking, by both of its clients, and vectors of three kinds."""

import cohere
from common import URL, check

texts = ["a boat", "a cat", "a dog"]
ranked = cohere.ClientV2(api_key="none", base_url=URL).rerank(model="demo", query="cat", documents=texts, top_n=2)
check(len(ranked.results) == 2)
kinds = ["float", "ubinary", "base64"]
found = cohere.ClientV2(api_key="none", base_url=URL).embed(
    model="demo", texts=texts, input_type="search_document", embedding_types=kinds
)
check(len(found.embeddings.float_) == len(found.embeddings.ubinary) == len(found.embeddings.base64) == 3)
old = cohere.Client(api_key="none", base_url=URL).rerank(
    model="demo", query="cat", documents=texts, return_documents=True
)
check({each.document.text for each in old.results} == set(texts))
