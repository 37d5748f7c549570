"""To and from Hugging Face: folders that transformers loads, and back."""
