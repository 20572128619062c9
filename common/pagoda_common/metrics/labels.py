"""Labels that frontends and schedulers put on their metrics, as vLLM does."""

LABELS = ("model_name", "engine")
ENGINE = "0"
