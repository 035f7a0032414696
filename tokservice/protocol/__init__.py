"""The shapes that clients see (OpenAI's requests and responses), used by the two worker packages alone."""
