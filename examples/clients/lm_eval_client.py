"""lm-eval (lm-evaluation-harness) against Pagoda: `local-completions`, log likelihoods and generation.

pip install "lm-eval[api]"; python examples/clients/lm_eval_client.py --base-url http://127.0.0.1:8000/v1

The two tasks are written to a temporary folder, so nothing is downloaded; real ones (`--tasks hellaswag`) work the
same way. Multiple choice scores the log probabilities of the prompt's own tokens (`echo` with `logprobs`).
"""

import argparse
import json
import os
import tempfile
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

CAPITALS = [
    ("France", "Paris", "Berlin"),
    ("Germany", "Berlin", "Rome"),
    ("Italy", "Rome", "Madrid"),
    ("Spain", "Madrid", "Paris"),
]
QUESTION = "<|im_start|>user\\nWhat is the capital of {{country}}?<|im_end|>\\n<|im_start|>assistant\\n"
CHOICE_TASK = f"""
task: capitals_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: DOCS}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{QUESTION}The capital of {{{{country}}}} is"
doc_to_choice: "{{{{[right + '.', wrong + '.']}}}}"
doc_to_target: 0
target_delimiter: " "
metric_list: [{{metric: acc}}]
"""
GENERATE_TASK = f"""
task: capitals_generate
dataset_path: json
dataset_kwargs: {{data_files: {{test: DOCS}}}}
test_split: test
output_type: generate_until
doc_to_text: "{QUESTION}"
doc_to_target: "The capital of {{{{country}}}} is {{{{right}}}}."
generation_kwargs: {{until: ["\\n"], max_gen_toks: 24, temperature: 0}}
metric_list: [{{metric: exact_match}}]
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pagoda-tiny")
    parser.add_argument("--tokenizer", help="folder or hub id of the tokenizer; default: the embedded model's")
    parser.add_argument("--api-key", default="none")
    args = parser.parse_args()
    os.environ["OPENAI_API_KEY"] = args.api_key
    embedded = Path(__file__).parents[2] / "common" / "pagoda_common" / "models" / "pagoda-tiny"
    with tempfile.TemporaryDirectory() as folder:
        docs = Path(folder, "capitals.jsonl")
        lines = (json.dumps(dict(zip(("country", "right", "wrong"), row, strict=True))) for row in CAPITALS)
        docs.write_text("\n".join(lines) + "\n")
        for name, task in (("choice", CHOICE_TASK), ("generate", GENERATE_TASK)):
            Path(folder, f"{name}.yaml").write_text(task.replace("DOCS", str(docs)))
        outcome = simple_evaluate(
            model="local-completions",
            model_args={
                "model": args.model,
                "base_url": f"{args.base_url}/completions",
                "tokenizer": args.tokenizer or str(embedded),
                "tokenizer_backend": "huggingface",
                "num_concurrent": 4,
                "max_retries": 1,
                "max_length": 1024,
            },
            tasks=["capitals_choice", "capitals_generate"],
            task_manager=TaskManager(include_path=folder, include_defaults=False),
            bootstrap_iters=0,
        )
    assert outcome is not None
    scores = outcome["results"]
    print(json.dumps(scores, indent=1, default=str))
    # The embedded model knows its capitals; another model is only asked to be scored at all.
    least = 0.75 if args.model == "pagoda-tiny" else 0.0
    assert scores["capitals_choice"]["acc,none"] >= least
    assert scores["capitals_generate"]["exact_match,none"] >= least


if __name__ == "__main__":
    main()
