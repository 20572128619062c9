"""Embeddings of some prompts."""

from argparse import Namespace

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
from vllm.utils.print_utils import print_embeddings


def parse_args() -> Namespace:
    parser = FlexibleArgumentParser()
    parser = EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="pagoda-tiny", runner="pooling", enforce_eager=True)
    return parser.parse_args()


def main(args: Namespace) -> None:
    llm = LLM(**vars(args))
    prompts = ["Hello, my name is", "The capital of France is"]
    for prompt, output in zip(prompts, llm.embed(prompts), strict=True):
        print_embeddings(output.outputs.embedding, prefix=f"{prompt!r}")


if __name__ == "__main__":
    main(parse_args())
