"""A teacher behind vLLM servers: they compute its states, and its ranks only ask for them (docs/teachers.md)."""
