"""A GGUF file by the converter that llama.cpp carries; for its virtual environment.

    python convert_gguf.py LLAMA_CPP_SOURCES CHECKPOINT FILE

The converter knows a tokenizer's way to cut text by a hash of known models; ours is the one of GPT-2.
"""

import runpy
import sys
from pathlib import Path


def main(sources: Path, checkpoint: str, file: str) -> None:
    """Run convert_hf_to_gguf.py with bf16 weights."""
    sys.path.insert(0, str(sources))
    from conversion.base import TextModel

    TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"
    sys.argv = ["convert_hf_to_gguf.py", checkpoint, "--outtype", "bf16", "--outfile", file]
    runpy.run_path(str(sources / "convert_hf_to_gguf.py"), run_name="__main__")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
