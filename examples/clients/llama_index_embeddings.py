"""LlamaIndex against Pagoda: OpenAILikeEmbedding for texts and queries, CohereRerank for nodes.

pip install llama-index-embeddings-openai-like llama-index-postprocessor-cohere-rerank
python examples/clients/llama_index_embeddings.py --base-url http://127.0.0.1:8000/v1 --model NAME
"""

import argparse

from llama_index.core.schema import NodeWithScore, TextNode
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.postprocessor.cohere_rerank import CohereRerank

TEXTS = ["The capital of France is Paris.", "Cats sleep a lot.", "Berlin is in Germany."]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    embedding = OpenAILikeEmbedding(
        model_name=args.model, api_base=args.base_url, api_key=args.api_key, max_retries=0, embed_batch_size=10
    )
    vectors = embedding.get_text_embedding_batch(TEXTS)
    query = embedding.get_query_embedding("What is the capital of France?")
    assert len(vectors) == len(TEXTS)
    assert len(query) == len(vectors[0])
    print(f"vectors of {len(query)}")

    ranker = CohereRerank(api_key=args.api_key, model=args.model, top_n=2, base_url=args.base_url.removesuffix("/v1"))
    nodes = [NodeWithScore(node=TextNode(text=text)) for text in TEXTS]
    ranked = ranker.postprocess_nodes(nodes, query_str="What is the capital of France?")
    assert len(ranked) == 2
    print(f"best: {ranked[0].text!r}")


if __name__ == "__main__":
    main()
