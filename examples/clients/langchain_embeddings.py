"""LangChain's OpenAIEmbeddings and CohereRerank against Pagoda: a vector store, and its hits ranked again.

pip install langchain-openai langchain-cohere
python examples/clients/langchain_embeddings.py --base-url http://127.0.0.1:8000/v1 --model NAME
"""

import argparse

import cohere
from langchain_cohere import CohereRerank
from langchain_core.vectorstores import InMemoryVectorStore
from langchain_openai import OpenAIEmbeddings

TEXTS = ["The capital of France is Paris.", "Cats sleep a lot.", "Berlin is in Germany."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    # Without check_embedding_ctx_length=False the package sends token ids of OpenAI's vocabulary.
    embeddings = OpenAIEmbeddings(
        base_url=args.base_url,
        api_key=args.api_key,
        model=args.model,
        check_embedding_ctx_length=False,
        max_retries=0,
    )
    store = InMemoryVectorStore.from_texts(TEXTS, embeddings)
    found = store.similarity_search("What is the capital of France?", k=2)
    assert len(found) == 2
    print(f"found: {found[0].page_content!r}")

    client = cohere.ClientV2(api_key=args.api_key, base_url=args.base_url.removesuffix("/v1"))
    ranker = CohereRerank(client=client, model=args.model, top_n=2)
    ranked = ranker.rerank(TEXTS, "What is the capital of France?")
    assert len(ranked) == 2
    assert ranked[0]["relevance_score"] >= ranked[1]["relevance_score"]
    print(f"best: {TEXTS[ranked[0]['index']]!r}")


if __name__ == "__main__":
    main()
