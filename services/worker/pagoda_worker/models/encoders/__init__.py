"""Runs models of transformers that make vectors, labels and scores of whole texts. Imported when a model needs it."""
