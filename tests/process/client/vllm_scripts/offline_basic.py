"""Prompts in a list, answers in a list, flags on the command line."""

from vllm import LLM, EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse() -> dict:
    parser = FlexibleArgumentParser()
    EngineArgs.add_cli_args(parser)
    parser.set_defaults(model="pagoda-tiny", max_model_len=256)
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, default=8)
    group.add_argument("--top-p", type=float, default=0.95)
    return vars(parser.parse_args())


def main() -> None:
    args = parse()
    max_tokens, top_p = args.pop("max_tokens"), args.pop("top_p")
    llm = LLM(**args)
    params = llm.get_default_sampling_params()
    params.max_tokens, params.top_p = max_tokens, top_p
    for output in llm.generate(["Once upon a time", "The dog"], params):
        print(f"{output.prompt!r} {output.outputs[0].text!r} {len(output.outputs[0].token_ids)} tokens")
    assert llm.llm_engine.model_config.max_model_len == 256


if __name__ == "__main__":
    main()
