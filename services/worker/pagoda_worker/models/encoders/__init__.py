"""Runs transformers models that compute vectors, labels and scores of whole texts. Imported when a model needs it."""
