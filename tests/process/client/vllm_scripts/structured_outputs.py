"""Choices, a regular expression, a JSON schema and a grammar."""

import json

from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

SCHEMA = {
    "type": "object",
    "properties": {"brand": {"enum": ["A", "B"]}, "year": {"type": "integer", "minimum": 1900, "maximum": 2100}},
    "required": ["brand", "year"],
    "additionalProperties": False,
}
GRAMMAR = """
root ::= select
select ::= "SELECT " column " FROM table"
column ::= "a" | "b"
"""


def generate(llm: LLM, prompt: str, constraint: StructuredOutputsParams) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=60, structured_outputs=constraint)
    return llm.generate(prompt, sampling_params=params, use_tqdm=False)[0].outputs[0].text


def main() -> None:
    llm = LLM(model="pagoda-tiny", max_model_len=200)
    mood = generate(llm, "The mood: ", StructuredOutputsParams(choice=["positive", "negative"]))
    assert mood in ("positive", "negative")
    mail = generate(llm, "A mail address: ", StructuredOutputsParams(regex=r"[a-z]{2,5}@[a-z]{2,5}\.com"))
    assert mail.endswith(".com")
    car = json.loads(
        generate(llm, "A car in JSON: ", StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True))
    )
    assert set(car) == {"brand", "year"}
    query = generate(llm, "SQL: ", StructuredOutputsParams(grammar=GRAMMAR))
    print(mood, mail, car, query)


if __name__ == "__main__":
    main()
