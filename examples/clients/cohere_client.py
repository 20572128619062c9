"""Cohere's package against Pagoda: embed in several types, and rerank.

pip install cohere; python examples/clients/cohere_client.py --base-url http://127.0.0.1:8000/v1 --model NAME
"""

import argparse

import cohere

DOCUMENTS = ["The capital of France is Paris.", "Cats sleep a lot.", "Berlin is in Germany."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    # The package adds /v2 itself.
    client = cohere.ClientV2(api_key=args.api_key, base_url=args.base_url.removesuffix("/v1"))

    made = client.embed(
        model=args.model,
        texts=DOCUMENTS,
        input_type="search_document",
        embedding_types=["float", "int8", "ubinary"],
    )
    assert made.embeddings.float_ is not None
    assert made.embeddings.int8 is not None
    assert made.embeddings.ubinary is not None
    assert len(made.embeddings.float_) == len(DOCUMENTS)
    size = len(made.embeddings.float_[0])
    assert len(made.embeddings.int8[0]) == size
    assert len(made.embeddings.ubinary[0]) == size // 8
    print(f"vectors of {size}")

    ranked = client.rerank(model=args.model, query="What is the capital of France?", documents=DOCUMENTS, top_n=2)
    assert len(ranked.results) == 2
    assert ranked.results[0].relevance_score >= ranked.results[1].relevance_score
    print(f"best: {DOCUMENTS[ranked.results[0].index]!r}")


if __name__ == "__main__":
    main()
