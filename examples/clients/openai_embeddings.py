"""The openai package against Pagoda's embeddings: one text and many, base64 and floats, a typed error.

pip install openai; python examples/clients/openai_embeddings.py --base-url http://127.0.0.1:8000/v1 --model NAME
"""

import argparse
import math

import openai

TEXTS = ["a dog runs in the park", "the cat sleeps", "stocks fell on Monday"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", required=True)
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    client = openai.OpenAI(base_url=args.base_url, api_key=args.api_key, max_retries=0)

    # By default the package asks for base64 and decodes it.
    made = client.embeddings.create(model=args.model, input=TEXTS)
    assert [one.index for one in made.data] == [0, 1, 2]
    size = len(made.data[0].embedding)
    print(f"vectors of {size}, {made.usage.prompt_tokens} tokens")

    plain = client.embeddings.create(model=args.model, input=TEXTS[0], encoding_format="float").data[0].embedding
    assert all(math.isclose(one, other, abs_tol=1e-3) for one, other in zip(plain, made.data[0].embedding, strict=True))

    try:
        client.embeddings.create(model=args.model, input=[])
    except openai.BadRequestError as error:
        print(f"refused: {error.message}")
    else:
        raise AssertionError("no input was not refused")


if __name__ == "__main__":
    main()
