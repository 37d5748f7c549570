"""A run behind the OpenAI protocol: many requests, drawn together from one array of states."""
