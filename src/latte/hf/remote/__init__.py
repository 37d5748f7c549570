"""The PyTorch code that goes with an exported folder; it knows nothing of this package."""
