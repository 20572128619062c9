"""Metrics of several models as one text: families once, a sample for each model, and nothing of the process twice."""

from prometheus_client import CollectorRegistry, Counter, Gauge, ProcessCollector, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from pagoda_frontend.observability.merged_metrics import merged


def text_of(model: str, value: float) -> bytes:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    Counter("vllm:tokens", "Tokens.", ("model_name", "engine"), registry=registry).labels(model, "0").inc(value)
    Gauge("pagoda:connected", "Connected.", registry=registry).set(value)
    return generate_latest(registry)


def samples(text: bytes, name: str) -> dict[str, float]:
    families = text_string_to_metric_families(text.decode())
    return {
        sample.labels.get("model_name", ""): sample.value
        for family in families
        for sample in family.samples
        if sample.name == name
    }


def test_each_model_has_its_samples_in_one_family() -> None:
    text = merged({"a": text_of("a", 1), "b": text_of("what the scheduler calls it", 2)})
    assert samples(text, "vllm:tokens_total") == {"a": 1.0, "b": 2.0}
    assert samples(text, "pagoda:connected") == {"a": 1.0, "b": 2.0}
    assert list(samples(text, "process_open_fds")) == [""]
    helps = [line.split()[2] for line in text.decode().splitlines() if line.startswith("# HELP")]
    assert len(helps) == len(set(helps))


def test_a_label_that_contains_the_name_of_another_is_kept() -> None:
    line = b'# HELP m M.\n# TYPE m gauge\nm{reason="x,model_name=\\"y\\"",model_name="old",engine="0"} 1 2\n'
    expected = '# HELP m M.\n# TYPE m gauge\nm{model_name="n\\"w",reason="x,model_name=\\"y\\"",engine="0"} 1 2\n'
    assert merged({'n"w': line}).decode() == expected


def test_families_of_one_model_alone_and_texts_without_help() -> None:
    text = merged({"a": b"x 1\n", "b": b"x 2\n# HELP y Y.\n# TYPE y gauge\ny 3\n"}).decode()
    assert text == 'x{model_name="a"} 1\nx{model_name="b"} 2\n# HELP y Y.\n# TYPE y gauge\ny{model_name="b"} 3\n'
    assert merged({"a": b"", "b": b""}) == b""


def test_a_line_that_is_no_sample_stays_as_it_is() -> None:
    assert merged({"a": b"x 1\nodd\n"}).decode() == 'x{model_name="a"} 1\nodd\n'
