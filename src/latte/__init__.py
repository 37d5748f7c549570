"""Latte: pretraining of linear-time language models, TPU first."""
