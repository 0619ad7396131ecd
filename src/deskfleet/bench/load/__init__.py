"""What any OpenAI-compatible endpoint does under load: decode, prefill, mixed arrivals."""
