"""guidellm's benchmark against Pagoda with synthetic prompts: a short run, to see that every request is answered.

pip install guidellm; python examples/clients/guidellm_client.py --base-url http://127.0.0.1:8000/v1
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--model", default="pagoda-tiny")
    parser.add_argument("--tokenizer", help="folder or hub id of the tokenizer; default: the embedded model's")
    parser.add_argument("--api-key", default="none")
    parser.add_argument("--num-requests", type=int, default=16)
    args = parser.parse_args()
    embedded = Path(__file__).parents[2] / "common" / "pagoda_common" / "models" / "pagoda-tiny"
    target = f"target={args.base_url.removesuffix('/v1')}"
    with tempfile.TemporaryDirectory() as folder:
        report_path = Path(folder, "report.json")
        tokenizer = args.tokenizer or str(embedded)
        command = [
            *(sys.executable, "-m", "guidellm", "run"),
            *("--backend", f"kind=openai_http,{target},model={args.model},api_key={args.api_key}"),
            *("--tokenizer", f"kind=huggingface_auto,model={tokenizer}"),
            *("--profile", "kind=concurrent,streams=4"),
            *("--constraint", f"kind=max_requests,count={args.num_requests}"),
            *("--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"),
            *("--output", f"kind=json,path={report_path}"),
            "--disable-console-interactive",
        ]
        subprocess.run(command, check=True, timeout=600, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        report = json.loads(report_path.read_text())
    counts = report["benchmarks"][0]["metrics"]["request_totals"]
    print(json.dumps(counts))
    assert counts["successful"] == args.num_requests, counts
    assert counts["errored"] == 0, counts


if __name__ == "__main__":
    main()
